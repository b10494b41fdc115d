"""Reads the named weights of a checkpoint: safetensors, or an archive of torch.save through the inert reader.

It knows no model. Nothing pickled is executed.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from helmrec.errors import ModelError
from helmrec.model.torch_zip import StoredTensor, TorchZip
from helmrec.model.weights import read_tensors

_MAX_SHOWN = 200  # characters of a name in a message


def read_checkpoint(path: Path, keys: Sequence[str] = ()) -> dict[str, Tensor]:
    """Return all weights of a file, or of all safetensors files of a folder, by name.

    `keys` lead to the weights in an archive of torch.save that holds more, such as an optimiser's state.
    """
    if path.is_dir():
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise ModelError(f"{path}: no safetensors file lies in this folder")
        return _joined([(file, read_tensors(file)) for file in files])
    if not path.is_file():
        raise ModelError(f"{path} is no file")
    if path.suffix == ".safetensors":
        if keys:
            raise ModelError(f"{path}: safetensors hold weights alone, nothing under {list(keys)}")
        return read_tensors(path)
    return _read_archive(path, keys)


def read_known(path: Path, keys: Sequence[str]) -> dict[str, Tensor]:
    """As `read_checkpoint`, without the entries of an archive that are no plain tensors, such as sharded tables.

    Weights that are saved alone need no keys. Extra state of layers is left out.
    """
    if path.is_dir() or path.suffix == ".safetensors":
        weights = read_checkpoint(path)
    else:
        with TorchZip.open(path) as archive:
            weights = archive.read_all(archive.tensors(*keys) or archive.tensors())
    return {name: value for name, value in weights.items() if not name.endswith("._extra_state")}


def _joined(parts: Sequence[tuple[Path, dict[str, Tensor]]]) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for file, found in parts:
        if repeated := sorted(found.keys() & weights.keys()):
            raise ModelError(f"{file}: weight {repeated[0][:_MAX_SHOWN]!r} is in another file of the folder too")
        weights |= found
    return weights


def _read_archive(path: Path, keys: Sequence[str]) -> dict[str, Tensor]:
    with TorchZip.open(path) as archive:
        saved = archive.saved(*keys)
        if not isinstance(saved, Mapping):
            where = f"under {list(keys)}" if keys else "in it"
            raise ModelError(f"{path}: a dictionary of weights is needed, {where} is a {type(saved).__name__}")
        for name, value in saved.items():
            if not isinstance(name, str):
                raise ModelError(f"{path}: a key is no name of a weight, got {str(name)[:_MAX_SHOWN]!r}")
            if not isinstance(value, StoredTensor):
                inner = " (a dictionary: perhaps the weights are under this key)" if isinstance(value, Mapping) else ""
                raise ModelError(f"{path}: {name[:_MAX_SHOWN]!r} is no tensor{inner}")
        return archive.read_all(saved)
