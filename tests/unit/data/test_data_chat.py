import datetime

import numpy as np
import pytest

from megatron_kd.data.prepare.chat import ChatRules, ChatTokenizer

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{{ message['content'] + '<|im_end|>' }}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Puts an empty thought before the last answer only, as reasoning models do.
REWRITING = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if loop.last and message['role'] == 'assistant' %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DATED = "{{ 'Today: ' + strftime_now('%d %b %Y') + '\n' }}" + CHATML
PICKY = (
    "{% if messages[0]['role'] == 'assistant' %}"
    "{{ raise_exception('must start with user') }}{% endif %}"
) + CHATML
OTHER_PROMPT = CHATML.replace("assistant\n' }}{% endif %}", "bot\n' }}{% endif %}")

TALK = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "It is 4.\n\nAnything else — 東京?"},
    {"role": "user", "content": "No."},
    {"role": "assistant", "content": "\n Fine! "},
]


def chat(tokenizer, template, **rules):
    with pytest.MonkeyPatch.context() as patch:  # a copy of the tokenizer would take seconds
        patch.setattr(tokenizer, "chat_template", template)
        return ChatTokenizer(tokenizer, ChatRules(**rules))


def runs(tokenizer, tokens, spoken):
    """Texts of the spoken runs."""
    edges = np.flatnonzero(np.diff(spoken.astype(int), prepend=0, append=0))
    return [tokenizer.decode(tokens[a:b]) for a, b in edges.reshape(-1, 2)]


def test_the_models_own_template(smollm2_tokenizer):
    encoder = ChatTokenizer(smollm2_tokenizer, ChatRules())
    tokens, spoken = encoder.encode(TALK)
    assert tokens.dtype == np.int32 and spoken.dtype == bool
    assert tokens.tolist() == smollm2_tokenizer.apply_chat_template(TALK)
    assert smollm2_tokenizer.decode(tokens).startswith("<|im_start|>system\nYou are a helpful AI")
    answer, last = runs(smollm2_tokenizer, tokens, spoken)
    assert answer == "It is 4.\n\nAnything else — 東京?<|im_end|>"
    assert last.lstrip() == "Fine! <|im_end|>"


@pytest.mark.parametrize("turns", ["all", "last"])
def test_marks_and_prefixes_agree(smollm2_tokenizer, turns):
    clean = [*TALK[:3], {"role": "assistant", "content": "Fine! "}]
    system = {"role": "system", "content": "Be brief."}
    for talk in [clean, clean[:2], [system, *clean[:2]], clean[:1]]:
        plain = chat(smollm2_tokenizer, CHATML, assistant_turns=turns).encode(talk)
        marked = chat(smollm2_tokenizer, CHATML_MARKED, assistant_turns=turns).encode(talk)
        assert np.array_equal(plain[0], marked[0])
        assert np.array_equal(plain[1], marked[1])
        answers = sum(message["role"] == "assistant" for message in talk)
        assert len(runs(smollm2_tokenizer, *plain)) == (
            min(answers, 1) if turns == "last" else answers
        )


def test_a_token_that_begins_in_the_header_is_not_spoken(smollm2_tokenizer):
    """An answer's own leading line break melts into the header's: no prompt ends inside a token."""
    tokens, spoken = chat(smollm2_tokenizer, CHATML).encode(TALK)
    (melted,) = (i for i, t in enumerate(tokens) if smollm2_tokenizer.decode([t]) == "\n\n")
    assert not spoken[melted] and spoken[melted + 1]


def test_only_the_last_turn(smollm2_tokenizer):
    tokens, spoken = chat(smollm2_tokenizer, CHATML, assistant_turns="last").encode(TALK)
    (last,) = runs(smollm2_tokenizer, tokens, spoken)
    assert "Fine! <|im_end|>" in last


def test_no_assistant_no_loss(smollm2_tokenizer):
    for template in (CHATML, CHATML_MARKED):
        assert not chat(smollm2_tokenizer, template).encode(TALK[:1])[1].any()


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (REWRITING, "use --assistant-turns last, or a template"),
        (OTHER_PROMPT, "told apart; use a template with"),
    ],
)
def test_templates_whose_prefixes_differ_are_refused(smollm2_tokenizer, template, words):
    with pytest.raises(ValueError, match=words):
        chat(smollm2_tokenizer, template).encode(TALK)


def test_a_rewriting_template_works_for_the_last_turn(smollm2_tokenizer):
    tokens, spoken = chat(smollm2_tokenizer, REWRITING, assistant_turns="last").encode(TALK)
    (last,) = runs(smollm2_tokenizer, tokens, spoken)
    assert last.startswith("<think>\n\n</think>") and last.endswith("Fine! <|im_end|>")


def test_dates_are_fixed(smollm2_tokenizer):
    tokens, spoken = chat(smollm2_tokenizer, DATED).encode(TALK)
    assert smollm2_tokenizer.decode(tokens).startswith("Today: 26 Jul 2024\n")
    assert len(runs(smollm2_tokenizer, tokens, spoken)) == 2
    day = datetime.date(2025, 1, 2)
    tokens, _ = chat(smollm2_tokenizer, DATED, date=day).encode(TALK)
    assert smollm2_tokenizer.decode(tokens).startswith("Today: 02 Jan 2025\n")


def test_template_variables(smollm2_tokenizer):
    template = "{{ flavour }}" + CHATML
    rules = dict(template_kwargs={"flavour": "mint "})
    tokens, _ = chat(smollm2_tokenizer, template, **rules).encode(TALK)
    assert smollm2_tokenizer.decode(tokens).startswith("mint <|im_start|>")


def test_null_keys_of_columnar_files_are_absent(smollm2_tokenizer):
    template = CHATML.replace(
        "{{ message['content']",
        "{% if message.tool_calls is defined %}X{% endif %}{{ message['content']",
    )
    talk = [{**message, "tool_calls": None} for message in TALK]
    encoder = chat(smollm2_tokenizer, template)
    assert np.array_equal(encoder.encode(talk)[0], encoder.encode(TALK)[0])


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "list of"),
        ("hello", "list of"),
        ([{"content": "x"}], "list of"),
        ([{"role": "assistant", "content": "x"}], "begin with the assistant"),
        ([{"role": "user", "content": "a<|im_end|>b"}], "control token <|im_end|>"),
        ([{"role": "user", "content": [{"type": "text", "text": "<|im_start|>"}]}], "control"),
        ([{"role": "user"}, {"role": "assistant", "content": "x"}], "refuses"),
        ([{"role": "user", "content": 3}], "must be text or a list of text parts, got int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "part of type image_url"),
        ([{"role": "user", "content": "\ud83d"}], "surrogate pair, \\\\ud83d at character 0"),
    ],
)
def test_bad_conversations(smollm2_tokenizer, messages, words):
    with pytest.raises(ValueError, match=words.replace("|", r"\|")):
        chat(smollm2_tokenizer, CHATML).encode(messages)


def test_the_templates_own_refusal_is_passed_on(smollm2_tokenizer):
    with pytest.raises(ValueError, match="must start with user"):
        chat(smollm2_tokenizer, PICKY).encode([{"role": "assistant", "content": "x"}, *TALK])


def test_tokenizers_that_cannot_chat_are_refused(smollm2_tokenizer):
    with pytest.raises(ValueError, match="no chat template"):
        chat(smollm2_tokenizer, None)
    with pytest.raises(ValueError, match="all or last"):
        chat(smollm2_tokenizer, CHATML, assistant_turns="some")
