"""A Hugging Face checkpoint on disk, read tensor by tensor so that a role loads only what it runs."""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import nn

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SNAPSHOT = re.compile(r"snapshots/([0-9a-f]{40})$")


class CheckpointError(Exception):
    """A checkpoint that cannot be used; the message says what is wrong and where."""


class Checkpoint:
    """The files of one model. Tensors are found by name over all shards."""

    def __init__(self, folder: Path):
        """Raises `CheckpointError` when the folder is no complete safetensors checkpoint."""
        self.folder = folder
        self.config = self.read_json("config.json")
        if self.config is None:
            raise CheckpointError(f"{folder} has no config.json")
        if "quantization_config" in self.config:
            raise CheckpointError(
                f"{folder} holds quantized weights; only float32, bfloat16 and float16 are served"
            )
        self._files = self._find_tensors()
        self.tensors_read: set[str] = set()

    @classmethod
    def find(cls, model: str, revision: str | None = None) -> "Checkpoint":
        """`model` is a folder or a hub id (downloaded, or taken from the cache when offline)."""
        folder = Path(model)
        if folder.is_dir():
            return cls(folder.resolve())
        try:
            return cls(Path(snapshot_download(model, revision=revision)))
        except (HFValidationError, LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
            raise CheckpointError(
                f"{model!r} is neither a folder nor a model that the hub or its cache can give: {error}"
            ) from error

    @property
    def architecture(self) -> str:
        names = self.config.get("architectures") if self.config else None
        return str(names[0]) if names else "unknown"

    @property
    def hub_commit(self) -> str | None:
        """The commit of a hub snapshot, which identifies the weights by itself."""
        match = _SNAPSHOT.search(self.folder.as_posix())
        return match.group(1) if match else None

    @property
    def tensor_files(self) -> Mapping[str, Path]:
        """Tensor name to the file that holds it."""
        return self._files

    def read_json(self, name: str) -> dict[str, Any] | None:
        """A JSON object of the checkpoint, or None where the file is absent. Raises `CheckpointError`."""
        path = self.folder / name
        if not path.exists():
            return None
        try:
            document = json.loads(path.read_text())
        except ValueError as error:
            raise CheckpointError(f"{path} is not JSON: {error}") from error
        if not isinstance(document, dict):
            raise CheckpointError(f"{path} is not a JSON object")
        return document

    def read_with(self, reader: Any, **options: Any) -> Any:
        """What one of transformers' classes (`AutoTokenizer`, `AutoImageProcessor`) makes of the folder.
        Raises `CheckpointError`."""
        try:
            return reader.from_pretrained(self.folder, **options)
        except Exception as error:  # by what is missing or damaged: of any kind
            raise CheckpointError(
                f"{self.folder}: {reader.__name__} cannot be made of its files: {error}"
            ) from error

    def num_values(self, rename: Callable[[str], str | None]) -> int:
        """Numbers in all tensors that `rename` (see `load_into`) gives a name; reads headers only."""
        total = 0
        for path, names in self._by_file(rename, None).items():
            with _opened(path) as file:
                total += sum(math.prod(file.get_slice(source).get_shape()) for source, _ in names)
        return total

    def load_into(
        self,
        module: nn.Module,
        rename: Callable[[str], str | None],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Fills every parameter of `module` (made under `empty_weights`) in place of its meta tensor.

        `rename` maps a checkpoint name to the module's name, or to None for tensors of other parts, which are
        not read. Raises `CheckpointError` for parameters the checkpoint lacks or has in another shape.
        """
        wanted = module.state_dict()
        state = {}
        for name, tensor in self._read(rename, wanted):
            if tensor.dtype not in _DTYPES:
                raise CheckpointError(f"tensor {name} is {tensor.dtype}; only {_DTYPES} are read")
            if wanted[name].shape != tensor.shape:
                raise CheckpointError(
                    f"tensor {name} is {list(tensor.shape)}, but the config says {list(wanted[name].shape)}"
                )
            state[name] = tensor.to(device=device, dtype=dtype)
        if missing := sorted(set(wanted) - set(state)):
            raise CheckpointError(f"the checkpoint lacks {len(missing)} tensors, {missing[0]} first")
        module.load_state_dict(state, assign=True)
        module.to(device)
        module.requires_grad_(False).eval()

    def _read(
        self, rename: Callable[[str], str | None], wanted: Mapping[str, Any]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for path, names in self._by_file(rename, wanted).items():
            with _opened(path) as file:
                for source, target in names:
                    self.tensors_read.add(source)
                    yield target, file.get_tensor(source)

    def _by_file(
        self, rename: Callable[[str], str | None], wanted: Mapping[str, Any] | None
    ) -> Mapping[Path, list[tuple[str, str]]]:
        by_file: dict[Path, list[tuple[str, str]]] = {}
        for source, path in self._files.items():
            target = rename(source)
            if target is not None and (wanted is None or target in wanted):
                by_file.setdefault(path, []).append((source, target))
        return by_file

    def _find_tensors(self) -> dict[str, Path]:
        index = self.read_json(INDEX_NAME)
        if index is not None:
            files = {name: self.folder / file for name, file in index.get("weight_map", {}).items()}
            if absent := sorted({p.name for p in files.values() if not p.exists()}):
                raise CheckpointError(f"{self.folder} lacks shard {absent[0]}")
            return files
        path = self.folder / SINGLE_NAME
        if not path.exists():
            raise CheckpointError(
                f"{self.folder} has no {SINGLE_NAME}; only safetensors checkpoints are read"
            )
        with _opened(path) as file:
            return dict.fromkeys(file.keys(), path)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def empty_weights() -> Any:
    """A context in which modules get parameters without memory, and real (computed) buffers."""
    from accelerate import init_empty_weights  # who only reads files (the fingerprint) does without it

    return init_empty_weights(include_buffers=False)
