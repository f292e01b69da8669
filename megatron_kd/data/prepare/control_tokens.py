"""The tokens that end and open turns, which no message may spell.

These are a tokenizer's special tokens, and of its other added tokens those that its chat template
puts before and after a user's message: DeepSeek's <｜User｜> is not marked special, and opens a
turn all the same. <think> and <tool_call>, which an assistant writes itself, are not among them.
"""

import re

PROBE = "word"
_USER = {"role": "user", "content": PROBE}


class ControlTokens:
    """Finds control tokens in text.

    Args:
        tokenizer: A fast transformers tokenizer.
        template: Its ChatTemplate, which shows what stands around a user's message; None looks for
            special tokens alone.
    """

    def __init__(self, tokenizer, template=None):
        added = tokenizer.added_tokens_decoder.values()
        names = {str(token) for token in tokenizer.all_special_tokens}
        names |= {token.content for token in added if token.special}
        if template is not None:
            names |= _around_a_user(template, {token.content for token in added})
        self.names = frozenset(names - {""})
        # Longest first, so that what is found is the token the tokenizer would find.
        any_of = "|".join(map(re.escape, sorted(self.names, key=lambda name: (-len(name), name))))
        nothing = "(?!)"
        self._any = re.compile(any_of or nothing)
        self._leading = re.compile(rf"\s*(?:{any_of or nothing})")
        # White space after the mark that ends a turn is the template's, not the assistant's.
        self._trailing = re.compile(rf"({any_of or nothing})\s*\Z")
        # A token can also be found in text that the normalizer makes equal to it.
        core = tokenizer.backend_tokenizer
        normalized = [t.content for t in added if t.normalized and t.content in self.names]
        self._normalize = core.normalizer.normalize_str if normalized and core.normalizer else None
        self._normalized = [(self._normalize(n), n) for n in normalized] if self._normalize else []

    def find(self, text: str) -> str | None:
        """A control token that the tokenizer would see in this text, if there is one."""
        if (found := self._any.search(text)) is not None:
            return found.group()
        if self._normalized:
            text = self._normalize(text)
            return next((name for form, name in self._normalized if form in text), None)
        return None

    def leading(self, text: str) -> str:
        """The control token that the text begins with and the white space before it, or ""."""
        found = self._leading.match(text)
        return found.group() if found else ""

    def end(self, text: str) -> int | None:
        """Where the control token ends that the text ends with, but for white space; or None."""
        found = self._trailing.search(text)
        return found.end(1) if found else None


def _around_a_user(template, added: set[str]) -> set[str]:
    try:
        asked = template.render([_USER], None)
        prompted = template.render([_USER], None, add_generation_prompt=True)
    except ValueError:
        return set()
    names = {name for name in added if name in asked.replace(PROBE, "", 1)}
    prompt = prompted[len(asked) :] if prompted.startswith(asked) else ""
    places = [(prompt.index(name), -len(name), name) for name in added if name in prompt]
    return names | ({min(places)[2]} if places else set())
