"""What a CUDA program says of itself: per method its delegates, each with a shared object and its constants.

The delegate's payload is `ETCUDAFQN3`, the library's key, then per constant: FQN, storage key, storage size, scalar
type, device type, storage offset, sizes and strides (executorch/backends/cuda/cuda_weight_collector.py of 1.5.1).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from exporter.contract.errors import VerificationFailed
from exporter.contract.segments import SCALAR_TYPES

MAGIC = b"ETCUDAFQN3"


@dataclass(frozen=True, slots=True)
class Constant:
    """A view on a stored storage: sizes, strides and offset in elements."""

    fqn: str
    key: str
    nbytes: int
    dtype: str
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "fqn": self.fqn,
            "key": self.key,
            "dtype": self.dtype,
            "offset": self.offset,
            "sizes": self.sizes,
            "strides": self.strides,
        }


@dataclass(frozen=True, slots=True)
class Delegate:
    """One AOTInductor library and the constants that it asks for.

    `inputs` are the method's inputs that it takes, in its own order, `outputs` the method's outputs that it gives; None
    where its arguments come from or go to other operators.
    """

    library: bytes
    constants: tuple[Constant, ...]
    inputs: tuple[int, ...] | None = None
    outputs: tuple[int, ...] | None = None


def decode_payload(payload: bytes) -> tuple[str, tuple[Constant, ...]]:
    """The library's key and the constants of a delegate's payload. `VerificationFailed` for any other bytes."""
    if not payload.startswith(MAGIC):
        raise VerificationFailed("the CUDA delegate's payload is of an unknown format", kind="format")
    try:
        return _decode(memoryview(payload)[len(MAGIC) :])
    except (struct.error, KeyError, UnicodeDecodeError, IndexError) as error:
        raise VerificationFailed("the CUDA delegate's payload is damaged", kind="format") from error


def _decode(view: memoryview) -> tuple[str, tuple[Constant, ...]]:
    at = 0

    def take(form: str) -> tuple[Any, ...]:
        nonlocal at
        values = struct.unpack_from(form, view, at)
        at += struct.calcsize(form)
        return values

    def text() -> str:
        nonlocal at
        (length,) = take("<I")
        value = bytes(view[at : at + length]).decode("utf-8")
        at += length
        return value

    library = text()
    constants = []
    for _ in range(take("<I")[0]):
        fqn, key = text(), text()
        nbytes, dtype, _device, offset, rank = take("<QiiqI")
        sizes, strides = take(f"<{rank}q"), take(f"<{rank}q")
        constants.append(Constant(fqn, key, nbytes, SCALAR_TYPES[dtype], offset, sizes, strides))
    return library, tuple(constants)


def find_delegates(program: bytes) -> dict[str, list[Delegate]]:
    """The CUDA delegates of every method of a `.pte`, in order."""
    from executorch.exir._serialize._program import deserialize_pte_binary
    from executorch.exir.schema import DataLocation

    parsed = deserialize_pte_binary(program)
    named = parsed.named_data
    found: dict[str, list[Delegate]] = {}
    for plan in parsed.program.execution_plan:
        delegates = found.setdefault(plan.name, [])
        for index, delegate in enumerate(plan.delegates):
            if delegate.id != "CudaBackend" or delegate.processed.location != DataLocation.INLINE:
                continue
            payload = parsed.program.backend_delegate_data[delegate.processed.index].data
            key, constants = decode_payload(bytes(payload))
            if named is None or key not in named.pte_data:
                raise VerificationFailed(f"method {plan.name} names a library that the program lacks", kind="format")
            library = bytes(named.buffers[named.pte_data[key].buffer_index])
            delegates.append(Delegate(library, constants, *_routes(plan, index)))
    return found


def _routes(plan: Any, index: int) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """Which method inputs and outputs the delegate's arguments are, seen through copies between host and device."""
    copied: dict[int, int] = {}
    arguments: list[int] = []
    for instruction in plan.chains[0].instructions:
        call = instruction.instr_args
        if hasattr(call, "delegate_index") and call.delegate_index == index:
            arguments = list(call.args)
        elif hasattr(call, "op_index") and plan.operators[call.op_index].name.startswith("et_copy::"):
            copied.update({place: call.args[0] for place in call.args[1:] if place != call.args[0]})

    def origin(place: int) -> int:
        while place in copied:
            place = copied[place]
        return place

    given = {place: position for position, place in enumerate(plan.inputs)}
    wanted = {origin(place): position for position, place in enumerate(plan.outputs)}
    inputs, outputs = [], []
    for place in arguments:
        if origin(place) in given:
            inputs.append(given[origin(place)])
        elif place in wanted:
            outputs.append(wanted[place])
        else:
            return None, None
    return tuple(inputs), tuple(outputs)
