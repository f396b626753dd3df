"""The one error tree. Every error has a code, a sentence for a person, a hint, and whether a retry can help.

No other exception crosses the boundary of a room: whoever calls a library wraps what it raises. `code` values are
public (the API, events and the command line all show them) and are only ever added to.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

Actor = Literal["user", "operator", "service", "nobody"]
Detail = str | int | bool | list[str] | None


class WeightlessError(Exception):
    """Base of all errors.

    `message` is one sentence that names the thing at fault; `hint` says what to do; `details` holds plain values for
    machines. None of them may contain a credential, a presigned URL or a token.
    """

    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False
    actor: ClassVar[Actor] = "service"
    default_hint: ClassVar[str] = ""

    def __init__(self, message: str, *, hint: str | None = None, stage: str | None = None, **details: Detail) -> None:
        super().__init__(message)
        self.message = message
        self.hint = self.default_hint if hint is None else hint
        self.stage = stage
        self.details: dict[str, Detail] = details

    def as_dict(self) -> dict[str, Any]:
        """The `error` object of a `failed` event and of the API: code, message, hint, retryable, stage, details."""
        return {
            "code": self.code,
            "message": self.message,
            "hint": self.hint,
            "retryable": self.retryable,
            "stage": self.stage,
            "details": dict(self.details),
        }


class InternalError(WeightlessError):
    """A bug of ours. `details["incident"]` names the log entry that has the traceback."""

    default_hint = "This is a fault of the service, not of the model. Report the incident id to its operator."


class InvalidRequest(WeightlessError):
    """The request, its options or its sample inputs do not make sense."""

    code = "invalid-request"
    actor = "user"
    default_hint = "Correct what is named; GET /recipes/{name} has a recipe's options and an example."


class SourceNotFound(WeightlessError):
    """There is nothing, or no usable weights, where the source points."""

    code = "source-not-found"
    actor = "user"
    default_hint = "Check the source's spelling and revision, and that it holds weights."


class SourceAccessDenied(WeightlessError):
    """The source exists outside of what may be read, or its owner refused."""

    code = "source-access-denied"
    actor = "user"
    default_hint = "Sources must lie under WEIGHTLESS_SOURCE_ROOTS; ask the operator to add the directory or prefix."


class SourceUnsafe(WeightlessError):
    """The source holds code, pickles, or headers that contradict its size; nothing of it was executed."""

    code = "source-unsafe"
    actor = "user"
    default_hint = "Save the weights as safetensors, or export the program again with torch.export.save."


class UnsupportedModel(WeightlessError):
    """The model needs operators or methods that the back end does not have. Details: `method`, `operators`."""

    code = "unsupported-model"
    actor = "user"
    default_hint = "Replace the operators named in the details, or choose another back end."


class HostOutOfMemory(WeightlessError):
    """The host ran out of memory: killed by the kernel, a cgroup limit, or a failed allocation."""

    code = "host-out-of-memory"
    actor = "operator"
    default_hint = "Give the exporter more host memory, or a lower hostMemory budget to see the stage that needs it."


class GpuOutOfMemory(WeightlessError):
    """The GPU ran out of memory."""

    code = "gpu-out-of-memory"
    actor = "operator"
    default_hint = "Use a GPU with more free memory; the stage and the peak are in the details."


class BudgetExceeded(WeightlessError):
    """The export went over a budget of its request. Details: `budget`, `limit`, `used`, and the stage."""

    code = "budget-exceeded"
    actor = "user"
    default_hint = "Raise the budget that is named, or make the model smaller."


class DiskFull(WeightlessError):
    """No space is left where the exporter or a `file://` store writes."""

    code = "disk-full"
    actor = "operator"
    retryable = True
    default_hint = "Free disk space at the path that is named, then retry."


class StoreUnavailable(WeightlessError):
    """The object store did not answer, or kept answering with a passing fault."""

    code = "store-unavailable"
    actor = "operator"
    retryable = True
    default_hint = "The store may be down or out of reach; retry, then check WEIGHTLESS_S3_ENDPOINT and the network."


class StoreRejected(WeightlessError):
    """The object store refused a request for good: permission, a missing bucket, a feature that it lacks."""

    code = "store-rejected"
    actor = "operator"
    default_hint = "Check the bucket, the permissions and WEIGHTLESS_S3_PROFILE; `weightless doctor` tests them."


class DeadlineExceeded(WeightlessError):
    """The export took longer than its `wallTime` budget or its deadline."""

    code = "deadline-exceeded"
    actor = "user"
    default_hint = "Raise budgets.wallTime, or look at the seconds per stage to see what took long."


class Cancelled(WeightlessError):
    """Somebody cancelled the export."""

    code = "cancelled"
    actor = "nobody"
    default_hint = "The export was cancelled on request; submit it again to run it."


class ExecutorLost(WeightlessError):
    """The exporter's node or process disappeared without evidence of memory; not counted against the user."""

    code = "executor-lost"
    actor = "operator"
    retryable = True
    default_hint = "The service retries by itself, at most three times."


class VerificationFailed(WeightlessError):
    """The stored artifact does not equal what was exported, or its outputs differ from eager."""

    code = "verification-failed"
    actor = "service"
    default_hint = "Do not use the artifact. The details name the file, segment or method that differs."


class ToolchainMismatch(WeightlessError):
    """No known executor can serve the target, or the installed torch or executorch is outside the seam table."""

    code = "toolchain-mismatch"
    actor = "operator"
    default_hint = "GET /recipes says what each executor can do and what it lacks."


class NotFound(WeightlessError):
    """No such export, recipe or object, or it is somebody else's."""

    code = "not-found"
    actor = "user"
    default_hint = "Check the id; an export of another owner answers as if it did not exist."


class NotFinished(WeightlessError):
    """The export has no manifest yet."""

    code = "not-finished"
    actor = "user"
    default_hint = "Wait for the state succeeded; GET /exports/{id}/events follows it."


class IdempotencyConflict(WeightlessError):
    """The same Idempotency-Key came with another body."""

    code = "idempotency-conflict"
    actor = "user"
    default_hint = "Use a new Idempotency-Key for a different request."


class IllegalState(WeightlessError):
    """The export's state does not allow this."""

    code = "illegal-state"
    actor = "user"
    default_hint = "Read the export's state first; GET /exports/{id} has it."


class BodyTooLarge(WeightlessError):
    """The request body is larger than 1 MiB."""

    code = "body-too-large"
    actor = "user"
    default_hint = "A request is at most 1 MiB; weights are named by URI, never sent."


class UnsupportedMediaType(WeightlessError):
    """The request body is not JSON."""

    code = "unsupported-media-type"
    actor = "user"
    default_hint = "Send Content-Type: application/json."


class QueueFull(WeightlessError):
    """The caller has too many queued exports, or the service is draining."""

    code = "queue-full"
    actor = "user"
    retryable = True
    default_hint = "Wait for the seconds in Retry-After, then send the request again."


class RateLimited(WeightlessError):
    """Too many requests in a short time."""

    code = "rate-limited"
    actor = "user"
    retryable = True
    default_hint = "Wait for the seconds in Retry-After, then send the request again."


class Unauthenticated(WeightlessError):
    """No usable token. `details["reason"]` is one of the reasons in http-api.md; the token is never echoed."""

    code = "unauthenticated"
    actor = "user"
    default_hint = "Send Authorization: Bearer with a valid token."


class Forbidden(WeightlessError):
    """The caller is known but may not do this. `details["reason"]` says which condition failed."""

    code = "forbidden"
    actor = "user"
    default_hint = "`weightless policy check` explains which rule decided."


def first_line(error: BaseException, limit: int = 300) -> str:
    """A foreign error's class and the first line of its text, at most `limit` characters, for a message of ours."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}"[:limit] if lines else type(error).__name__


def _tree(root: type[WeightlessError]) -> dict[str, type[WeightlessError]]:
    found: dict[str, type[WeightlessError]] = {}
    for child in root.__subclasses__():
        found.setdefault(child.code, child)
        found.update(_tree(child))
    return found


def error_class(code: str) -> type[WeightlessError]:
    """The class of a code; `InternalError` for a code that this version does not know."""
    return _tree(WeightlessError).get(code, InternalError)


def error_from_dict(data: dict[str, Any]) -> WeightlessError:
    """The error that `as_dict` wrote, for a reader of events or of the API."""
    kind = error_class(str(data.get("code", "internal")))
    details = data.get("details") or {}
    error = kind(str(data.get("message", "")), hint=str(data.get("hint", "")), stage=data.get("stage"))
    error.details = dict(details)
    return error
