import functools

import pytest
import transformers


@pytest.fixture(scope="session", autouse=True)
def tokenizers_load_once():
    """Reading a 49,152-word tokenizer takes seconds; the commands under test run many times."""
    real = transformers.AutoTokenizer.from_pretrained
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.AutoTokenizer, "from_pretrained", functools.cache(real))
        yield
