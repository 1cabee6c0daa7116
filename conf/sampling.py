"""Settings for sampling a text with `hlatctl generate`, with their defaults and rules."""

from __future__ import annotations

from dataclasses import dataclass

from hlatctl.run.errors import ConfigError

#: Seeds of PyTorch's generators are below this.
SEEDS = 2**32
#: Limits of the temperature: below, logits overflow; above, all tokens are equally likely.
_COLDEST, _HOTTEST = 0.01, 100


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The settings of one text.

    Args:
        max_new_tokens: maximum tokens after the prompt.
        temperature: divides the logits; 0 always takes the likeliest token (greedy).
        top_p: sample from the likeliest tokens that together have this probability; 1: from all.
        top_k: sample from this many of the likeliest tokens; 0: from all.
        seed: random seed for sampling.

    Raises:
        ConfigError: a value is out of range; names its option.
    """

    max_new_tokens: int = 128
    temperature: float = 0.8
    top_p: float = 0.95
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the values."""
        if self.max_new_tokens < 1:
            raise _out_of_range("max-new-tokens", self.max_new_tokens, "at least 1")
        if not (self.is_greedy or _COLDEST <= self.temperature <= _HOTTEST):
            rule = f"0 (always the likeliest token), or from {_COLDEST} to {_HOTTEST}"
            raise _out_of_range("temperature", self.temperature, rule)
        if not 0 < self.top_p <= 1:
            raise _out_of_range("top-p", self.top_p, "more than 0 and at most 1 (all tokens)")
        if self.top_k < 0:
            raise _out_of_range("top-k", self.top_k, "0 (all tokens) or more")
        if not 0 <= self.seed < SEEDS:
            raise _out_of_range("seed", self.seed, f"from 0 to {SEEDS - 1}")

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken, so that the seed and the other limits have no effect."""
        return self.temperature == 0


_USUAL = {
    "max-new-tokens": Sampling.max_new_tokens,
    "temperature": Sampling.temperature,
    "top-p": Sampling.top_p,
    "top-k": Sampling.top_k,
    "seed": Sampling.seed,
}


def _out_of_range(option: str, value: float, rule: str) -> ConfigError:
    return ConfigError(f"--{option}={value}: must be {rule}", hint=f"`--{option} {_USUAL[option]}` is the usual value")
