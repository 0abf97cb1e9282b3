"""Sizes that a user can ask for and no machine has."""

import pytest

from rose.runtime.build import ModelOptions, build
from tests import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save_decoder(tmp_path_factory.mktemp("model"), "llama")


@pytest.mark.parametrize(
    ("option", "value", "found"),
    [
        ("kv_cache_memory", 100 << 40, r"109951162777600 bytes are more than this machine has"),
        ("max_num_seqs", 10**9, r"1000000000 is more than the 65536 sequences"),
    ],
)
def test_what_no_machine_has_is_refused_before_it_is_listed(folder, option, value, found):
    with pytest.raises(ValueError, match=f"{option}: {found}"):
        build(ModelOptions(path=str(folder), device="cpu", **{option: value}))


def test_what_embeds_alone_has_no_cache(tmp_path):
    path = str(tiny.save_bert(tmp_path))
    build(
        ModelOptions(path=path, device="cpu", max_batch_tokens=32, kv_cache_memory=1 << 50)
    ).close()
