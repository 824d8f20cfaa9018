"""Secrets of the environment reach none of the files that a run leaves."""

import json
import logging
import sys

import pytest

from dvla.config import Config, ModelConfig, RunConfig
from dvla.runtime.run_folder import claim, prepare
from dvla.telemetry.logs import set_up_logging
from dvla.telemetry.redact import redact
from dvla.telemetry.summary import SUMMARY_KEYS, write_summary

SECRET = "hf_0123456789"


@pytest.fixture(autouse=True)
def secrets(monkeypatch):
    monkeypatch.setenv("MY_HF_TOKEN", SECRET)
    monkeypatch.setenv("longer_api_key", f"{SECRET}-and-more")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")


def test_names_take_the_place_of_values():
    assert redact(f"a {SECRET} {SECRET}-and-more false") == "a <MY_HF_TOKEN> <longer_api_key> false"


def test_no_file_of_a_run_has_them(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train", f"model.checkpoint=https://{SECRET}@hub"])
    config = Config(run=RunConfig(root=str(tmp_path)), model=ModelConfig(checkpoint=f"https://{SECRET}@hub"))
    with claim(config.run.folder):
        logs = prepare(config, resuming=False)
    before = list(logging.getLogger().handlers)
    set_up_logging(1, logs)
    try:
        raise ValueError(SECRET)
    except ValueError:
        logging.getLogger("dvla").exception("with %s", SECRET)
    for handler in [handler for handler in logging.getLogger().handlers if handler not in before]:
        logging.getLogger().removeHandler(handler)
        handler.close()
    write_summary(config.run.folder / "summary.json", dict.fromkeys(SUMMARY_KEYS) | {"exit": "failed", "error": SECRET})
    texts = {path.name: path.read_text() for path in config.run.folder.rglob("*") if path.is_file()}
    assert texts.keys() == {"config.yaml", "env.json", "rank00001.log", "summary.json"}
    assert all(SECRET not in text and "<MY_HF_TOKEN>" in text for text in texts.values()), texts
    assert json.loads(texts["summary.json"])["error"] == "<MY_HF_TOKEN>"
