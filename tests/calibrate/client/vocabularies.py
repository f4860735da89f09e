"""Token counters with real vocabularies, for tests of prompt lengths."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from servesim.calibrate.client.prompts import WORDS

from ...sentencepiece_model import sentencepiece_model

PACKAGE = "llama-tokenizer-js"  # npm: the vocabulary of Llama 1 and 2
FOLDER_VARIABLE = "SERVESIM_LLAMA_TOKENIZER"  # environment: a folder where the package is installed
COUNT = """
import fs from 'fs';
const { default: llama } = await import(process.argv[1]);
const texts = JSON.parse(fs.readFileSync(0, 'utf8'));
console.log(JSON.stringify(texts.map(text => llama.encode(text).length)));
"""


def count_llama_tokens(texts: Sequence[str]) -> list[int]:
    """Return the Llama tokens of each text, BOS included; skip the test without Node or its package."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs Node to count with the vocabulary of Llama")
    module = install_package() / "node_modules" / PACKAGE / "llama-tokenizer.js"
    command = [node, "--input-type=module", "-e", COUNT, module.as_uri()]
    done = subprocess.run(command, input=json.dumps(texts), capture_output=True, text=True, timeout=600, check=True)
    counts: list[int] = json.loads(done.stdout)
    return counts


def install_package() -> Path:
    """Return the folder of the npm package: from the environment, or a cache folder where it is installed once."""
    folder = Path(os.environ.get(FOLDER_VARIABLE) or Path.home() / ".cache" / "servesim-tests")
    if (folder / "node_modules" / PACKAGE).is_dir():
        return folder
    npm = shutil.which("npm")
    if npm is None or FOLDER_VARIABLE in os.environ:
        pytest.skip(f"needs the npm package {PACKAGE}, installed in the folder that {FOLDER_VARIABLE} names")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as new:  # another process may install it at the same time
        options = ["--fetch-retries=0", "--fetch-timeout=10000", "--no-audit", "--no-fund", "--prefix", new]
        command = [npm, "install", *options, f"{PACKAGE}@1.2.2"]
        try:
            subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            pytest.skip(f"cannot install the npm package {PACKAGE}: {str(error.stderr)[-200:].strip()}")
        with suppress(OSError):  # the other process was faster
            os.rename(Path(new) / "node_modules", folder_for_modules(folder))
    return folder


def folder_for_modules(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder / "node_modules"


def count_sentencepiece_tokens(texts: Sequence[str], kind: str) -> list[int]:
    """Return the tokens of each text, BOS included, in a vocabulary that has our words."""
    sentencepiece = pytest.importorskip("sentencepiece")
    processor = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model(WORDS, kind))
    return [len(processor.encode(text, add_bos=True)) for text in texts]
