"""config.json of OLMo 2. Free of torch."""

from functools import partial

from rose.models.decoder_config import Family, decoder_architecture, read_decoder_config

_FAMILY = Family(
    "olmo2",
    vocab_size=50304,
    intermediate_size=11008,
    max_positions=2048,
    norm_eps=1e-5,
)

OLMO2 = decoder_architecture(
    "olmo2", partial(read_decoder_config, _FAMILY), "rose.models.olmo2:Olmo2Model"
)
