"""What a caller may do: the policy file (contract.md), and the reason for each refusal.

The first rule whose `who` matches the caller decides alone. Globs match whole strings; `*` is any text, `?` one
character.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, StringConstraints, ValidationError, model_validator
from pydantic.alias_generators import to_camel

from exporter.contract.base import Duration, Strict
from exporter.contract.errors import Forbidden, InvalidRequest
from exporter.contract.spec import Budgets, ExportRequest
from service.jobs import Export
from service.source_rules import normalised

Action = Literal["read", "read-all", "submit", "cancel", "delete", "admin"]
ALL_ACTIONS: frozenset[Action] = frozenset({"read", "read-all", "submit", "cancel", "delete", "admin"})
OWN_ACTIONS: frozenset[Action] = frozenset({"read", "submit", "cancel"})
DEFAULT_EVENTS = ("push", "workflow_dispatch", "schedule", "merge_group", "release")
"""Workflow events that a rule without `eventName` means. A pull_request_target token carries the base branch's ref."""
MAX_POLICY = 2**20
_Glob = Annotated[str, StringConstraints(min_length=1, max_length=512)]
_Id = Annotated[int, Field(ge=1, strict=True)]
_BUDGETS = ("host_memory", "gpu_memory", "scratch_disk", "wall_time")


class Who(Strict):
    """Conditions on the caller; all that are given must hold, and within one any of its values."""

    repository_id: tuple[_Id, ...] | None = None
    repository_owner_id: tuple[_Id, ...] | None = None
    event_name: tuple[_Glob, ...] | None = None
    ref: tuple[_Glob, ...] | None = None
    ref_protected: bool | None = None
    environment: tuple[_Glob, ...] | None = None
    job_workflow_ref: tuple[_Glob, ...] | None = None
    token: tuple[_Glob, ...] | None = None

    @model_validator(mode="after")
    def _someone(self) -> Who:
        if not any(value for name, value in self if name != "ref_protected"):
            raise ValueError("a rule names who it is for")
        if self.token is not None and any(value is not None for name, value in self if name != "token"):
            raise ValueError("a rule is for tokens or for workflows, not both")
        if self.token is None and self.repository_id is None and self.repository_owner_id is None:
            raise ValueError("a rule for workflows names repositoryId or repositoryOwnerId: names can be taken over")
        return self


class Rule(Strict):
    """What the callers that match `who` may do."""

    who: Who
    may: tuple[Action, ...]
    recipes: tuple[_Glob, ...] = ("*",)
    sources: tuple[_Glob, ...] = ("*",)
    prefix: Annotated[
        str, StringConstraints(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*)?$")
    ] = ""
    budgets: Budgets = Budgets()
    concurrent: Annotated[int, Field(ge=1)] | None = None
    presign: Duration | None = None


class PolicyFile(Strict):
    """The file as a whole."""

    default: Literal["deny", "allow"] = "deny"
    rules: tuple[Rule, ...] = ()


@dataclass(frozen=True, slots=True)
class Caller:
    """Who is calling. `claims` are an OIDC token's, `scopes` a bearer token's; `view` is what people are shown."""

    kind: Literal["local", "token", "github"]
    owner: str
    view: Mapping[str, Any]
    claims: Mapping[str, Any] = field(default_factory=dict)
    token_id: str | None = None
    scopes: frozenset[Action] | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """One rule against one caller: `failed` is the reason code of the first condition that does not hold."""

    rule: int
    matched: bool
    failed: str | None
    met: int
    sentence: str


@dataclass(frozen=True, slots=True)
class Access:
    """What one caller may do, and the rule that says so (None: the default, or no policy)."""

    caller: Caller
    actions: frozenset[Action]
    rule: Rule | None = None
    reason: str = "scope"
    findings: tuple[Finding, ...] = ()

    def require(self, action: Action) -> None:
        """`Forbidden` unless `action` is allowed."""
        if action not in self.actions:
            raise _forbidden(f"this caller may not {action}", self.reason)

    def require_recipe(self, recipe: str) -> None:
        """`Forbidden` unless the rule names the recipe."""
        if self.rule is not None and not _any_glob(self.rule.recipes, recipe):
            raise _forbidden(f"this caller may not use the recipe {recipe}", "recipe")

    def require_source(self, source: str) -> None:
        """`Forbidden` unless the rule names the source; `SourceAccessDenied` where it is no source at all."""
        if self.rule is not None and not _any_glob(self.rule.sources, normalised(source)):
            raise _forbidden("this caller's rule does not name the source", "source")

    def may_see(self, export: Export) -> bool:
        """Whether the export exists for this caller."""
        return export.owner == self.caller.owner or bool({"read-all", "admin"} & self.actions)

    def may_change(self, export: Export) -> bool:
        """Whether the export is this caller's to cancel or delete."""
        return export.owner == self.caller.owner or "admin" in self.actions

    def authorise(self, request: ExportRequest) -> ExportRequest:
        """The request with the rule's budgets where it has none; `Forbidden` otherwise."""
        self.require("submit")
        self.require_recipe(request.recipe)
        self.require_source(request.source)
        if self.rule is None:
            return request
        merged = {}
        for name in _BUDGETS:
            limit, asked = getattr(self.rule.budgets, name), getattr(request.budgets, name)
            if limit is not None and asked is not None and asked > limit:
                raise _forbidden(f"the budget {to_camel(name)} is above this caller's limit of {limit}", "budget")
            merged[name] = limit if asked is None else asked
        return request.model_copy(update={"budgets": Budgets.model_validate(merged)})


class Policy:
    """The rules in force. Without a file, a token's scopes decide alone."""

    def __init__(self, file: PolicyFile | None) -> None:
        self._file = file

    def access(self, caller: Caller) -> Access:
        """What `caller` may do."""
        if caller.kind == "local":
            return Access(caller, ALL_ACTIONS)
        scopes = _implied(caller.scopes) if caller.scopes is not None else ALL_ACTIONS
        if self._file is None:
            return Access(caller, scopes if caller.kind == "token" else frozenset())
        findings = self.explain(caller)
        for finding in findings:
            if finding.matched:
                rule = self._file.rules[finding.rule]
                return Access(caller, _implied(rule.may) & scopes, rule, "scope", findings)
        if self._file.default == "allow":
            return Access(caller, OWN_ACTIONS & scopes, None, "scope", findings)
        closest = max(findings, key=lambda item: item.met, default=None)
        reason = "repository" if caller.kind == "github" else "scope"
        return Access(caller, frozenset(), None, (closest.failed if closest else None) or reason, findings)

    def explain(self, caller: Caller) -> tuple[Finding, ...]:
        """Each rule against `caller`, in order; the first that matched decides."""
        rules = () if self._file is None else self._file.rules
        return tuple(_match(index, rule.who, caller) for index, rule in enumerate(rules))


def _implied(actions: Iterable[Action]) -> frozenset[Action]:
    """What the actions allow: `admin` is all of them, on everyone's exports; who reads all exports reads its own."""
    given = frozenset(actions)
    if "admin" in given:
        return ALL_ACTIONS
    return given | {"read"} if "read-all" in given else given


def load_policy(path: Path | None) -> Policy:
    """The policy in a file; `InvalidRequest` names the place of a mistake."""
    if path is None:
        return Policy(None)
    try:
        text = path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"the policy file cannot be read: {error.strerror}", hint=str(path)) from error
    return Policy(parse_policy(text))


def parse_policy(text: bytes) -> PolicyFile:
    """The policy in YAML: plain data only, no repeated or unknown keys."""
    if len(text) > MAX_POLICY:
        raise InvalidRequest("the policy file is larger than 1 MiB", hint="Split the service instead.")
    hint = "The README has an example of a policy file, under Policy."
    try:
        raw = yaml.load(text, _UniqueKeys)  # noqa: S506 - a subclass of SafeLoader
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise InvalidRequest(f"the policy file is not plain YAML: {str(error)[:300]}", hint=hint) from error
    try:
        return PolicyFile.model_validate({} if raw is None else raw)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InvalidRequest(f"the policy file is wrong at {where or 'its root'}: {first['msg']}", hint=hint) from error


class _UniqueKeys(yaml.SafeLoader):
    """YAML's safe loader, which otherwise lets the last of two equal keys win; aliases are refused as well."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        repeated = sorted({str(key) for key in keys if keys.count(key) > 1})
        if repeated:
            raise yaml.constructor.ConstructorError(None, None, f"repeated key {repeated[0]}", node.start_mark)
        return super().construct_mapping(node, deep=deep)

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, "aliases are not allowed", self.peek_event().start_mark)  # type: ignore[no-untyped-call]
        return super().compose_node(parent, index)


def _match(index: int, who: Who, caller: Caller) -> Finding:
    met = 0
    for condition in _conditions(who, caller):
        if not condition.holds:
            sentence = f"rule {index + 1} does not match: {condition.sentence}"
            return Finding(index, False, condition.reason, met, sentence)
        met += 1
    return Finding(index, True, None, met, f"rule {index + 1} matches and decides")


@dataclass(frozen=True, slots=True)
class _Condition:
    """One key of `who` against a caller; `reason` is the code of a refusal for it."""

    reason: str
    name: str
    wanted: bool | tuple[Any, ...]
    given: Any

    @property
    def holds(self) -> bool:
        if isinstance(self.wanted, bool):
            return str(self.given).lower() == ("true" if self.wanted else "false")
        if isinstance(self.given, str) and any(isinstance(item, str) for item in self.wanted):
            return _any_glob(self.wanted, self.given)
        return _number(self.given) in self.wanted

    @property
    def sentence(self) -> str:
        listed = [self.wanted] if isinstance(self.wanted, bool) else self.wanted
        wanted = " or ".join(str(item).lower() if isinstance(item, bool) else str(item) for item in listed[:20])
        given = "there is none" if self.given is None else f"it is {str(self.given)[:200]!r}"
        return f"{self.name} must be {wanted or 'something'}, and {given}"


_CLAIMS = (
    ("repository", "repository_id"),
    ("owner", "repository_owner_id"),
    ("event", "event_name"),
    ("ref", "ref"),
    ("ref", "ref_protected"),
    ("environment", "environment"),
    ("workflow", "job_workflow_ref"),
)
"""Reason codes and claims, the identity first: the reason of the first condition that fails is the answer's."""


def _conditions(who: Who, caller: Caller) -> Iterator[_Condition]:
    if who.token is not None or caller.kind == "token":
        yield _Condition("scope", "token", who.token or (), caller.token_id)
        return
    for reason, name in _CLAIMS:
        wanted = getattr(who, name)
        if wanted is None and name == "event_name":
            wanted = DEFAULT_EVENTS
        if wanted is not None:
            yield _Condition(reason, to_camel(name), wanted, caller.claims.get(name))


def _number(value: Any) -> int | None:
    text = str(value) if isinstance(value, (int, str)) and not isinstance(value, bool) else ""
    return int(text) if re.fullmatch(r"[0-9]{1,19}", text, re.ASCII) else None


def _any_glob(globs: tuple[str, ...], value: str) -> bool:
    return any(_glob(pattern).fullmatch(value) for pattern in globs)


def _glob(pattern: str) -> re.Pattern[str]:
    parts = (".*" if char == "*" else "." if char == "?" else re.escape(char) for char in re.sub(r"\*+", "*", pattern))
    return re.compile("".join(parts), re.DOTALL)


def _forbidden(message: str, reason: str) -> Forbidden:
    return Forbidden(message, reason=reason)
