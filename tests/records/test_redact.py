"""Secrets in texts and settings."""

from __future__ import annotations

import pytest

from tunesmith.records.redact import redact, redact_values


@pytest.mark.parametrize(
    "text",
    [
        "http://user:S3CRETVALUE@host/r?key=S3CRETVALUE",
        "could not reach 'https://S3CRETVALUE@host:81/': refused",
        "http://host/r?a=S3CRETVALUE&b=S3CRETVALUE#end",
        "http://a@b:S3CRETVALUE@host/r",
        "urls = [\"http://host/?sig=S3CRETVALUE\", 'ws://u:S3CRETVALUE@h']",
        "Authorization: Bearer S3CRETVALUE",
        "http://user:a b S3CRETVALUE@host/r",
        "http://user:a'S3CRETVALUE@host/r",
        'http://user:"S3CRETVALUE@host/r',
        "http://host/r?S3CRETVALUE",
        "http://host/r#token=S3CRETVALUE",
        "hf_S3CRETVALUES3CRETVALUE and sk-S3CRETVALUES3CRETVALUE",
    ],
)
def test_no_secret_is_left(text: str) -> None:
    assert "S3CRETVALUE" not in redact(text)


@pytest.mark.parametrize(
    "text",
    [
        "http://127.0.0.1:8100/reward",
        "https://host/a/b#c is fine; x@y.z wrote to /path?",
        "the token 'abc' of the tokenizer has no key = value",
        "a bearer of news",
        "http://host:80 is down, as x@y.z said",
    ],
)
def test_all_else_stays(text: str) -> None:
    assert redact(text) == text


def test_host_and_names_of_a_url_stay() -> None:
    assert (
        redact("http://me:pw@host:80/r?key=abc&n=2 is down")
        == "http://***@host:80/r?key=***&n=*** is down"
    )


def test_settings_are_redacted_by_name_and_inside() -> None:
    given = {
        "urls": ["http://u:p@h/"],
        "api_key": "abc",
        "max_tokens": 5,
        "reward": {"hub_token": "t", "n": None},
    }
    assert redact_values(given) == {
        "urls": ["http://***@h/"],
        "api_key": "***",
        "max_tokens": 5,
        "reward": {"hub_token": "***", "n": None},
    }
