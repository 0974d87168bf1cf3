"""MiniLM takes seconds to load: once for all tests here."""

import pytest

from router.fingerprint import MiniLMFingerprinter


@pytest.fixture(scope="session")
def minilm() -> MiniLMFingerprinter:
    return MiniLMFingerprinter(threads=1)
