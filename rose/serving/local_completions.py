"""The methods of `rose.Engine` that continue prompts."""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from itertools import repeat
from typing import Any

from rose.models.generation import SAMPLING
from rose.runtime.build import ServedModel
from rose.runtime.errors import NonFiniteError, RequestError
from rose.runtime.options import SamplingParams
from rose.serving.gateway.choice import CONTEXT_TOKENS
from rose.serving.gateway.detokenization import TokenTable
from rose.serving.gateway.templates import render
from rose.serving.gateway.tokenization import Tokenizer
from rose.serving.local_generation import ChatPrompt, Completion, LocalGenerator, Request
from rose.serving.local_inputs import Ids, Text, as_list, checked_ids
from rose.serving.local_rows import Progress


class GenerateMethods:
    """What an engine does with a model that generates."""

    _served: ServedModel
    _tokenizer: Tokenizer
    _local_generator: LocalGenerator | None

    def generate(
        self,
        prompts: Text | Sequence[Text],
        params: SamplingParams | None = None,
        *,
        stop: Sequence[str] = (),
        progress: Progress | None = None,
    ) -> list[Completion]:
        """Continue prompts: texts, or lists of token ids, which are used as they are.

        Args:
            prompts: one prompt or a sequence of them.
            params: how tokens are chosen, and when an output ends.
            stop: texts that end an output; they do not appear in it.
            progress: called with (prompts done, prompts in all).

        Returns:
            A completion per prompt, in their order.

        Raises:
            RequestError: a prompt or a parameter does not fit; the others are cancelled then.
            NonFiniteError: the model computed NaN for a prompt.
        """
        items = as_list(prompts)
        found: dict[int, Completion] = {}
        pairs = zip(items, repeat(params or SamplingParams()))
        with closing(self.generate_each(pairs, stop=stop)) as outcomes:
            for index, outcome in outcomes:
                if isinstance(outcome, Exception):
                    raise _at_prompt(index, outcome)
                found[index] = outcome
                if progress:
                    progress(len(found), len(items))
        return [found[index] for index in range(len(items))]

    def generate_each(
        self,
        prompts: Iterable[tuple[Text, SamplingParams]],
        *,
        stop: Sequence[str] = (),
        on_tokens: Callable[[int], None] | None = None,
    ) -> Generator[tuple[int, Completion | Exception], None, None]:
        """Continue any number of prompts, each in its own way, and yield each as it ends.

        Args:
            prompts: a prompt, and how it is continued. They are taken as there is room for them.
            stop: texts that end an output; they do not appear in it.
            on_tokens: called after each step with the number of new tokens.

        Returns:
            Pairs of a prompt's index and its completion, or what is wrong with it: a ValueError,
            a NonFiniteError, or a fault that is not the prompt's. Closing the iterator cancels
            what is under way.

        Raises:
            RequestError: the model cannot generate.
        """
        requests = (self._checked(prompt, params) for prompt, params in prompts)
        return self._generator().run(requests, stop, on_tokens)

    def stream(
        self, prompt: Text, params: SamplingParams | None = None, *, stop: Sequence[str] = ()
    ) -> Generator[str, None, None]:
        """Continue one prompt; yields its text piece by piece. Closing the iterator cancels it.

        Raises:
            RequestError: the prompt or a parameter does not fit.
        """
        request = self._request(prompt, params or SamplingParams())
        return self._generator().stream(request, stop)

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> ChatPrompt:
        """Render a conversation with the model's chat template, ready for the model's answer.

        Args:
            messages: dicts with "role" and "content".

        Returns:
            The prompt's token ids.

        Raises:
            TemplateError: the model has no chat template, or it refuses the messages.
        """
        text = render(self._served.card.tokenizer, messages, add_generation_prompt=True)
        return ChatPrompt(self._tokenizer.encode([text], add_special_tokens=False)[0].tolist())

    def sampling_params(self, **values: Any) -> SamplingParams:  # noqa: ANN401 - as the class
        """Make `SamplingParams` with the checkpoint's defaults for what is None or left out.

        Raises:
            RequestError: a value is out of range, or the model cannot generate.
        """
        facts = self._served.card.generation
        names = (*SAMPLING, "logit_bias", "min_tokens")
        defaults = {name: getattr(facts, name) for name in names} if facts else {}
        given = {name: value for name, value in values.items() if value is not None}
        known = {name: value for name, value in defaults.items() if value is not None}
        bias = {**known.get("logit_bias", {}), **given.get("logit_bias", {})}
        params = SamplingParams(**{**known, **given, "logit_bias": bias})
        self._generator().check(params)
        return params

    def _generator(self) -> LocalGenerator:
        if self._served.generation is None:
            raise RequestError(f"model {self._served.card.name!r} cannot generate", "model")
        if self._local_generator is None:
            table = TokenTable(self._tokenizer.backend)
            self._local_generator = LocalGenerator(self._served.generation, table)
        return self._local_generator

    def _checked(self, prompt: Text, params: SamplingParams) -> Request | Exception:
        try:
            return self._request(prompt, params)
        except ValueError as error:
            return error

    def _request(self, prompt: Text, params: SamplingParams) -> Request:
        ids = self._prompt_ids(prompt)
        begins = isinstance(prompt, ChatPrompt)
        return Request(ids, params, () if begins else ids[-CONTEXT_TOKENS:].tolist())

    def _prompt_ids(self, prompt: Text) -> Ids:
        """Return the ids of a prompt; the runtime checks their number."""
        if isinstance(prompt, str):
            return self._tokenizer.encode([prompt])[0]
        return checked_ids("prompt", prompt, self._served.card.vocab_size)


def _at_prompt(index: int, error: Exception) -> Exception:
    """Say which prompt an error is about, if it is about one."""
    place = f"prompts[{index}]"
    if isinstance(error, RequestError):
        return RequestError(f"{place}: {error}", place if error.field == "prompt" else error.field)
    if isinstance(error, NonFiniteError):
        return NonFiniteError(f"{place}: {error}", place)
    return error
