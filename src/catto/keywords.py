"""Which keywords a trainer's configuration takes, read from its source: importing it would import torch."""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path

_TRAINING = (("transformers", "training_args.py", "TrainingArguments"),)
# Configuration -> the classes whose fields it has: package, file, class.
CONFIGS = {
    "TrainingArguments": _TRAINING,
    "CATTOConfig": (
        ("catto", "training/config.py", "CATTOConfig"),
        ("trl", "trainer/dpo_config.py", "DPOConfig"),
        ("trl", "trainer/base_config.py", "_BaseConfig"),
        *_TRAINING,
    ),
    "LoraConfig": (
        ("peft", "tuners/lora/config.py", "LoraConfig"),
        ("peft", "config.py", "PeftConfig"),
        ("peft", "config.py", "PeftConfigMixin"),
    ),
}


@cache
def keywords(config: str) -> frozenset[str]:
    """The keywords of one of CONFIGS; none where a library is missing or laid out in another way.

    >>> "num_train_epochs" in keywords("TrainingArguments")
    True
    """
    found: set[str] = set()
    for package, file, name in CONFIGS[config]:
        fields = _fields(package, file, name)
        if not fields:
            return frozenset()
        found |= fields
    return frozenset(found)


def _fields(package: str, file: str, name: str) -> set[str]:
    """The annotated names in a class's body: a dataclass's fields."""
    spec = find_spec(package)
    path = None if spec is None or spec.origin is None else Path(spec.origin).parent / file
    if path is None or not path.exists():
        return set()
    classes = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)]
    return {
        entry.target.id
        for one in classes
        if one.name == name
        for entry in one.body
        if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name)
        if "ClassVar" not in ast.unparse(entry.annotation)
    }
