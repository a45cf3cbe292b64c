"""Defaults that the makers of a model recommend in its folder: sampling values, and prompts before texts to embed."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from parley.errors import UnknownPromptName, excerpt
from parley.text.tokens.json_files import read_json_object
from parley.types import PoolingOptions

# The sampling values of generation_config.json, and the range of each that all APIs allow: requests have them in place
# of members that they lack, so a value beyond it would refuse requests that do not even name it.
SAMPLING_DEFAULTS: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (sys.float_info.min, 1),
    "top_k": (0, 2**31 - 1),
    "min_p": (0, 1),
    "repetition_penalty": (sys.float_info.min, 100),
    "max_new_tokens": (1, 2**31 - 1),
}
WHOLE_NUMBERS = ("top_k", "max_new_tokens")


@dataclass(frozen=True)
class EmbeddingPrompts:
    """The prompts that sentence-transformers puts before a text to embed, by name, and the name of the default one."""

    prompts: dict[str, str] = field(default_factory=dict)
    default_name: str | None = None
    lowercase: bool = False  # lower-case the texts

    @classmethod
    def from_folder(cls, folder: Path) -> EmbeddingPrompts:
        """Load the prompts of a model folder. Raises BadTokenizer."""
        config = read_json_object(folder / "config_sentence_transformers.json")
        prompts, default_name = config.get("prompts"), config.get("default_prompt_name")
        prompts = prompts if isinstance(prompts, dict) else {}
        prompts = {name: text for name, text in prompts.items() if isinstance(text, str)}
        lower = any(
            read_json_object(path).get("do_lower_case") is True for path in folder.glob("sentence_*_config.json")
        )
        return cls(prompts, default_name if isinstance(default_name, str) and default_name in prompts else None, lower)

    def apply_prompt(self, text: str, pooling: PoolingOptions) -> str:
        """Return the text with the named (or default) prompt before it. Raises UnknownPromptName."""
        name = self._find_prompt(pooling)
        prefixed = self.prompts[name] + text if name is not None else text
        return prefixed.lower() if self.lowercase else prefixed

    def find_instruction(self, pooling: PoolingOptions) -> str:
        """Return the prompt that a request names, or "" if it names none. Raises UnknownPromptName."""
        name = self._find_prompt(pooling) if pooling.prompt is not None else None
        return self.prompts[name] if name is not None else ""

    def _find_prompt(self, pooling: PoolingOptions) -> str | None:
        """Return the name of the prompt that a request means; None: no prompt."""
        if pooling.prompt is None:
            return self.default_name
        for name in (pooling.prompt, *pooling.prompt_aliases):
            if name in self.prompts:
                return name
        if pooling.prompt_optional and not self.prompts:
            return None
        known_names = sorted(self.prompts)
        message = f"The model has no prompt {excerpt(pooling.prompt)}; it has {', '.join(known_names) or 'none'}."
        raise UnknownPromptName(message, name=pooling.prompt, known=known_names, field="prompt_name")


def read_sampling_defaults(folder: Path) -> dict[str, float]:
    """Return the sampling values in generation_config.json that are numbers of their range. Raises BadTokenizer."""
    config = read_json_object(folder / "generation_config.json")
    defaults: dict[str, float] = {}
    for name, (least, most) in SAMPLING_DEFAULTS.items():
        value = config.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
            continue
        if name not in WHOLE_NUMBERS:
            defaults[name] = value
        elif value == int(value):
            defaults[name] = int(value)
    return defaults
