"""The command line."""

from __future__ import annotations

from dataclasses import fields

import pytest

from epd_proxy.cli import main, parse
from epd_proxy.config import Limits, Origin, Services

PD = ["--pd", "http://127.0.0.1:8002"]
SPLIT = ["--prefill", "http://p:1", "--prefill", "http://p:2", "--decode", "http://d:1"]


def test_instances_keep_their_order_and_limits_their_defaults():
    config = parse(["--encoder", "http://b:1/", "--encoder", "https://a", *PD])
    assert [(o.url, o.host, o.port, o.tls) for o in config.instances["encoder"]] == [
        ("http://b:1", "b", 1, False),
        ("https://a", "a", 443, True),
    ]
    assert config.instances["pd"] == (Origin.parse("http://127.0.0.1:8002"),)
    assert config.limits == Limits()
    assert (config.host, config.port) == ("127.0.0.1", 8000)


def test_instances_by_service():
    services = ["--encoder-service", "d-encoder", "--pd-service", "d-pd", "--kubernetes-namespace", "models"]
    config = parse(services)
    assert config.services == Services("models", {"encoder": "d-encoder", "pd": "d-pd"})
    assert config.instances == {}


def test_prefill_and_decode_take_the_place_of_a_pd():
    config = parse(["--encoder", "http://e", *SPLIT])
    assert config.instances["prefill"] == (Origin.parse("http://p:1"), Origin.parse("http://p:2"))
    assert config.roles == ("encoder", "prefill", "decode")
    assert parse(PD).roles == ("encoder", "pd")
    by_service = ["--prefill-service", "p", "--decode-service", "d", "--kubernetes-namespace", "n"]
    assert parse(by_service).services == Services("n", {"prefill": "p", "decode": "d"})
    assert parse(by_service).roles == ("encoder", "prefill", "decode")


def test_every_limit_has_a_flag():
    flags = {
        "max_body": "--max-body-bytes",
        "max_buffered": "--max-buffered-bytes",
        "max_items": "--max-media-items",
        "max_in_flight": "--max-in-flight",
        "connect": "--connect-timeout",
        "primer": "--primer-timeout",
        "prefill": "--prefill-timeout",
        "decode": "--decode-timeout",
        "first_token": "--first-token-timeout",
        "answer": "--answer-timeout",
        "idle": "--idle-timeout",
        "drain": "--drain-timeout",
    }
    arguments = [word for n, flag in enumerate(flags.values(), 1) for word in (flag, str(n))]
    limits = parse([*PD, *arguments]).limits
    assert [getattr(limits, name) for name in flags] == list(range(1, 13))
    assert set(flags) == {field.name for field in fields(Limits)}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--pd"),
        (["--pd", "127.0.0.1:8002"], "is no URL such as http://"),
        (["--pd", "http://h:1/v1"], "scheme, host and port only"),
        (["--pd", "http://h:99999"], "ort"),
        ([*PD, *PD], "given twice"),
        (["--encoder-service", "e", "--kubernetes-namespace", "n"], "--pd-service is needed"),
        ([*PD, *SPLIT], "--pd does both steps by itself, so --prefill has no meaning"),
        (["--prefill", "http://p"], "--prefill needs --decode: one hands over"),
        (["--decode", "http://d"], "--decode needs --prefill"),
        (["--prefill", "http://d", "--decode", "http://d"], "hand over to itself"),
        ([*SPLIT, "--kubernetes-namespace", "n"], "given by address"),
        (["--pd-service", "a", "--decode-service", "b"], "--pd-service does both steps"),
        (["--prefill-service", "a"], "--prefill-service needs --decode-service"),
        (["--prefill-service", "a", "--decode-service", "a"], "are the same"),
        ([*PD, "--pd-service", "p"], "not both"),
        (["--pd-service", "p", "--encoder-service", "p"], "the same"),
        (["--pd-service", "p"], "--kubernetes-namespace is needed"),
        (["--pd-service", "p,q"], "is no name"),
        ([*PD, "--max-buffered-bytes", "1"], "would never fit"),
        ([*PD, "--max-in-flight", "0"], "not positive"),
        ([*PD, "--idle-timeout", "inf"], "not positive"),
        ([*PD, "--idle-timeout", "x"], "--idle-timeout"),
    ],
)
def test_a_wrong_command_line_is_explained(arguments, words, capsys):
    with pytest.raises(SystemExit) as end:
        parse(arguments)
    assert end.value.code == 2
    assert words in capsys.readouterr().err


def test_help_teaches(capsys):
    with pytest.raises(SystemExit):
        parse(["--help"])
    text = capsys.readouterr().out
    assert "epd-proxy --encoder http://127.0.0.1:8001 --pd http://127.0.0.1:8002" in text
    assert "--max-in-flight" in text


def test_a_file_of_keys_that_cannot_be_used_ends_the_process(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["epd-proxy", *PD, "--api-keys-file", str(tmp_path / "none.json")])
    with pytest.raises(SystemExit, match=r"--api-keys-file .*none.json: .*No such file"):
        main()
