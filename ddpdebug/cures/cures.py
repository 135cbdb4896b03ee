"""The cures: for each code with one mechanical remedy, the source change that applies it. Torch-free.

A cure says why it cannot (`CannotError`) where the source leaves a choice: two optimizers, two wrappers, a name that
nothing is known of. It never guesses.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ddpdebug.cures.source import CannotError, Source
from ddpdebug.schema.finding import Finding


@dataclass(frozen=True, slots=True)
class Case:
    """A finding, the source file that it is about, and the line if known."""

    source: Source
    finding: Finding
    line: int | None

    @property
    def statement(self) -> ast.stmt:
        """The statement on the finding's line."""
        if self.line is None:
            raise CannotError("the finding names no line")
        return self.source.statement(self.line)


Cure = Callable[[Case], None]
_OPTIMIZERS = frozenset(
    {
        *("SGD", "Adam", "AdamW", "Adamax", "Adagrad", "Adadelta", "Adafactor", "ASGD", "LBFGS", "NAdam", "RAdam"),
        *("RMSprop", "Rprop", "SparseAdam", "ZeroRedundancyOptimizer"),
    }
)
_WRAPPERS = frozenset({"DDP", "DistributedDataParallel", "DebugDDP"})


def _last(words: str) -> str:
    return words.rpartition(".")[2]


def _only(found: Sequence[ast.Call], what: str) -> ast.Call:
    if len(found) != 1:
        raise CannotError(f"there are {len(found)} {what} in the file, not one" if found else f"there is no {what}")
    return found[0]


def _steps(source: Source, within: ast.AST) -> list[tuple[str, str, ast.stmt]]:
    """Return the optimizer steps in a part of the file: optimizer, loss scaler (or nothing), statement."""
    found = []
    for words, call in source.calls(within):
        name, _, method = words.rpartition(".")
        if method != "step" or not name:
            continue
        statement = source.statement_of(call)
        if call.args and isinstance(call.args[0], ast.Name | ast.Attribute) and _is_scaler(source, name):
            found.append((ast.unparse(call.args[0]), name, statement))
        elif _is_optimizer(source, name):
            found.append((name, "", statement))
    return found


def _is_scaler(source: Source, name: str) -> bool:
    return any(_last(words) == "GradScaler" for words in source.assigned(name)) or "scaler" in name.lower()


def _is_optimizer(source: Source, name: str) -> bool:
    made = source.assigned(name)
    if made:
        return any(_last(words) in _OPTIMIZERS for words in made)
    return "opt" in _last(name).lower()


def _step(source: Source, statement: ast.stmt) -> tuple[str, str, ast.stmt]:
    """Return the one optimizer step that belongs to a statement: in the loop around it, or the loop around that."""
    for around in (statement, *source.around(statement)):
        found = _steps(source, around)
        if len({name for name, _, _ in found}) > 1 or len(found) > 1:
            raise CannotError("several optimizer steps belong to this line")
        if found:
            return found[0]
        if isinstance(around, ast.FunctionDef | ast.AsyncFunctionDef):
            break
    raise CannotError("no optimizer step belongs to this line")


def _need_torch(source: Source) -> None:
    if not any(isinstance(n, ast.Import) and any(a.name == "torch" for a in n.names) for n in source.tree.body):
        raise CannotError("the file does not import torch")


def _has(call: ast.Call, keyword: str, *, value: object) -> bool:
    given = [k.value for k in call.keywords if k.arg == keyword]
    return any(isinstance(each, ast.Constant) and each.value is value for each in given)


def _wrapper(source: Source) -> ast.Call:
    return _only([call for words, call in source.calls() if _last(words) in _WRAPPERS], "wrappers by DDP")


# --- the loop ---------------------------------------------------------------------------------------------------------


def _clear(case: Case) -> None:
    """Clear the gradients after each optimizer step."""
    source = case.source
    name, _, step = _step(source, case.statement)
    cleared = [words for words, _ in source.calls(source.scope(step)) if _last(words) == "zero_grad"]
    if cleared:
        raise CannotError(f"gradients are cleared there by {cleared[0]}()")
    source.insert(f"{name}.zero_grad()", after=step)


def _clear_later(case: Case) -> None:
    """Clear the gradients after the optimizer step, no longer before it."""
    source = case.source
    name, _, step = _step(source, case.statement)
    cleared = _only(
        [call for words, call in source.calls(source.scope(step)) if words == f"{name}.zero_grad"],
        f"calls of {name}.zero_grad",
    )
    statement = source.statement_of(cleared)
    source.delete(statement)
    source.insert(source.words(statement), after=step)


def _schedule_later(case: Case) -> None:
    """Step the schedule once for each optimizer step."""
    source = case.source
    statement = case.statement
    if case.finding.evidence.get("stepped") != "per micro-batch":
        raise CannotError("what its schedule should be like only its author knows")
    loop = source.loop(statement)
    _, _, step = _step(source, statement)
    if loop is None or loop in source.around(step):
        raise CannotError("the schedule is not stepped in an inner loop")
    if not (isinstance(statement, ast.Expr) and ".step(" in source.words(statement)):
        raise CannotError("the line is no step of a schedule")
    source.delete(statement)
    source.insert(source.words(statement), after=step)


def _unscale(case: Case) -> None:
    """Take the loss scale out of the gradients before they are clipped."""
    source = case.source
    statement = case.statement
    name, scaler, _ = _step(source, statement)
    if not scaler:
        raise CannotError("no step of a GradScaler belongs to this line")
    if any(words == f"{scaler}.unscale_" for words, _ in source.calls()):
        raise CannotError(f"{scaler}.unscale_() is called already, elsewhere")
    source.insert(f"{scaler}.unscale_({name})", before=statement)


def _divide(case: Case) -> None:
    """Divide the loss by the number of micro-batches."""
    source = case.source
    statement, parts = case.statement, case.finding.evidence.get("micro_batches")
    if case.finding.evidence.get("divided_by", 1) != 1:
        raise CannotError("the loss is divided already, by another number")
    if type(parts) is not int or parts < 2:
        raise CannotError("the number of micro-batches is not known")
    found = [call for words, call in source.calls(statement) if words.endswith(".backward") and not call.args]
    call = _only(found, "calls of backward on this line")
    assert isinstance(call.func, ast.Attribute)
    source.replace(call.func.value, f"({source.words(call.func.value)} / {parts})")


def _update_scale(case: Case) -> None:
    """Update the loss scale after each step."""
    source = case.source
    name, scaler, step = _step(source, case.statement)
    if not scaler or any(words == f"{scaler}.update" for words, _ in source.calls()):
        raise CannotError(f"no GradScaler steps {name} without an update")
    source.insert(f"{scaler}.update()", after=step)


def _train_again(case: Case) -> None:
    """Put the model into train mode before the forward that trains."""
    source = case.source
    statement = case.statement
    evaluated = {words.rpartition(".")[0] for words, _ in source.calls() if _last(words) == "eval"} - {""}
    called = {words for words, _ in source.calls(statement)}
    names = {name for name in called if any(_last(made) in _WRAPPERS for made in source.assigned(name))}
    names = names or called & evaluated
    if len(names) != 1:
        raise CannotError("no model is called on this line whose name is known")
    if not evaluated:
        raise CannotError("nothing in this file puts a model into eval mode")
    source.insert(f"{names.pop()}.train()", before=statement)


# --- the loss ---------------------------------------------------------------------------------------------------------


def _no_softmax(case: Case) -> None:
    """Give the loss what is before the softmax (or sigmoid), which it applies itself."""
    source = case.source
    applied = str(case.finding.evidence.get("applied_before"))
    if applied not in {"softmax", "sigmoid", "log_softmax"}:
        raise CannotError("what is applied before the loss is not known")
    module = {"softmax": "Softmax", "sigmoid": "Sigmoid", "log_softmax": "LogSoftmax"}[applied]
    found = [call for words, call in source.calls() if _last(words) in {applied, module}]
    call = _only(found, f"uses of {applied}")
    if _last(ast.unparse(call.func)) == module:
        where = ast.unparse(call.func).rpartition(".")[0]
        source.replace(call, f"{where}.Identity()" if where else "torch.nn.Identity()")
    elif call.args and ast.unparse(call.func).rpartition(".")[0] in {"F", "torch", "nn.functional", "functional"}:
        source.replace(call, source.words(call.args[0]))
    elif isinstance(call.func, ast.Attribute):
        source.replace(call, source.words(call.func.value))
    else:
        raise CannotError(f"what {applied} is applied to is not clear")


def _detach(case: Case) -> None:
    """Keep the value without the graph that has made it."""
    source = case.source
    statement, holder = case.statement, case.finding.subject[0] if case.finding.subject else ""
    kept = None
    for words, call in source.calls(statement):
        if _last(words) == "append" and len(call.args) == 1 and words.rpartition(".")[0] == holder:
            kept = call.args[0]
    if kept is None:
        grown = [
            node.value
            for node in ast.walk(source.scope(statement))
            if (isinstance(node, ast.AugAssign) and ast.unparse(node.target) == holder)
            or (
                isinstance(node, ast.Assign)
                and [ast.unparse(target) for target in node.targets] == [holder]
                and holder in {ast.unparse(each) for each in ast.walk(node.value) if isinstance(each, ast.expr)}
            )
        ]
        kept = grown[0] if len(grown) == 1 else None
    if kept is None:
        raise CannotError(f"no line shows how {holder or 'the holder'} comes to keep graphs")
    if not isinstance(kept, ast.Name | ast.Attribute | ast.Subscript | ast.BinOp | ast.IfExp):
        raise CannotError("what is kept is not a tensor by name")
    source.replace(kept, f"{_operand(source, kept)}.detach()")


def _same_shape(case: Case) -> None:
    """Take away the last dimension, of size 1, that makes prediction and target broadcast."""
    source = case.source
    found = [call for _, call in source.calls(_loss_made(case)) if len(call.args) > 1]
    call = _only(found, "calls with a prediction and a target on this line")
    wide = call.args[0 if len(case.finding.evidence.get("prediction") or ()) > 1 else 1]
    source.replace(wide, f"{_operand(source, wide)}.squeeze(-1)")


def _loss_made(case: Case) -> ast.AST:
    """Return the statement that makes the loss, where the finding names the line of its `backward()`."""
    names = {words.rpartition(".")[0] for words, _ in case.source.calls(case.statement) if _last(words) == "backward"}
    made = [
        node
        for node in ast.walk(case.source.scope(case.statement))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in names
    ]
    return made[0] if len(made) == 1 else case.statement


# --- the model --------------------------------------------------------------------------------------------------------


def _register(case: Case) -> None:
    """Register the modules: a `ModuleList` or `ModuleDict` holds them, no longer a plain list or dict."""
    source = case.source
    name = _last((case.finding.subject or ("",))[0].partition("[")[0])
    found = [
        n for n in ast.walk(source.tree) if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == f"self.{name}"
    ]
    if not name.isidentifier() or len(found) != 1:
        raise CannotError("no one line gives the modules to an attribute of the model")
    value = held = found[0].value
    if isinstance(value, ast.Name):
        made = [
            n.value for n in ast.walk(source.scope(found[0])) if isinstance(n, ast.Assign) and _is_named(n, value.id)
        ]
        held = made[0] if len(made) == 1 else value
    kinds = {ast.List: "ModuleList", ast.ListComp: "ModuleList", ast.Dict: "ModuleDict", ast.DictComp: "ModuleDict"}
    if type(held) not in kinds:
        raise CannotError(f"what self.{name} is given is no list and no dict")
    source.replace(value, f"{_nn(source)}.{kinds[type(held)]}({source.words(value)})")


def _inside(case: Case) -> None:
    """Ask the model inside of the wrapper."""
    source = case.source
    asked = re.search(r"has no attribute '(\w+)'", str(case.finding.evidence.get("error")))
    name = asked[1] if asked else ""
    found = [n for n in ast.walk(case.statement) if isinstance(n, ast.Attribute) and n.attr == name]
    if len(found) != 1:
        raise CannotError("no one place on this line asks for it")
    if any(call.func is found[0] for _, call in source.calls(case.statement)):
        raise CannotError(
            f"{name}() may use parameters: it must be part of the forward, or its gradients are not reduced"
        )
    source.replace(found[0].value, f"{source.words(found[0].value)}.module")


def _without_prefix(case: Case) -> None:
    """Load the checkpoint by the names that the model has."""
    source = case.source
    calls = [call for words, call in source.calls(case.statement) if _last(words) == "load_state_dict"]
    call = _only(calls, "calls of load_state_dict on this line")
    keys = dict(
        re.findall(r'(Missing|Unexpected) key\(s\)[^"]*"(module|_orig_mod)\.', str(case.finding.evidence.get("error")))
    )
    state = call.args[0] if call.args else None
    if keys.get("Missing") == "module" and isinstance(call.func, ast.Attribute):
        source.replace(call.func.value, f"{source.words(call.func.value)}.module")
    elif "Unexpected" in keys and isinstance(state, ast.Name | ast.Attribute | ast.Subscript):
        _need_torch(source)
        strip = "torch.nn.modules.utils.consume_prefix_in_state_dict_if_present"
        source.insert(f'{strip}({source.words(state)}, "{keys["Unexpected"]}.")', before=case.statement)
    else:
        raise CannotError("what is loaded has no name, or the names of both are not known")


def _no_devices(case: Case) -> None:
    """Wrap the model, which lies on the CPU, without the numbers of GPUs."""
    if "device(type='cpu')" not in str(case.finding.evidence.get("error")):
        raise CannotError("the model lies on several devices")
    call = _wrapper(case.source)
    given = [name for name in ("device_ids", "output_device") if _keyword(call, name)]
    if not given:
        raise CannotError("the wrapper is given no devices by name")
    for name in given:
        case.source.remove_keyword(call, name)


# --- the ranks --------------------------------------------------------------------------------------------------------


def _own_share(case: Case) -> None:
    """Give each rank its own share of the data set."""
    source = case.source
    shuffled = [
        call
        for words, call in source.calls()
        if _last(words) == "DataLoader" and call.args and _has(call, "shuffle", value=True)
    ]
    call = _only(shuffled, "loaders that shuffle")
    if any(_last(words) == "DistributedSampler" for words, _ in source.calls()):
        raise CannotError("a DistributedSampler is made already")
    _need_torch(source)
    keyword = next(keyword for keyword in call.keywords if keyword.arg == "shuffle")
    data = source.words(call.args[0])
    source.replace(keyword, f"sampler=torch.utils.data.DistributedSampler({data})")


def _set_epoch(case: Case) -> None:
    """Give the sampler the epoch, by which it shuffles."""
    source = case.source
    sampler = _only([c for words, c in source.calls() if _last(words) == "DistributedSampler"], "samplers")
    name = _name_of(source, sampler)
    uses = [c for words, c in source.calls() if _last(words) == "DataLoader" and _keyword(c, "sampler") == name]
    loader = _name_of(source, _only(uses, f"loaders with {name}"))
    loops = [
        node
        for node in ast.walk(source.tree)
        if isinstance(node, ast.For) and loader in {ast.unparse(node.iter), *_arguments(node.iter)}
    ]
    outer = [(node, source.loop(node)) for node in loops]
    found = [(n, o.target.id) for n, o in outer if isinstance(o, ast.For) and isinstance(o.target, ast.Name)]
    if len(loops) != 1 or not found or found[0][1] == "_":
        raise CannotError(f"no loop over epochs around one loop over {loader} has a name for the epoch")
    source.insert(f"{name}.set_epoch({found[0][1]})", before=found[0][0])


def _whole_batches(case: Case) -> None:
    """Leave the last batch of an epoch out, which may hold one sample."""
    source = case.source
    loaders = [call for words, call in source.calls() if _last(words) == "DataLoader"]
    call = _only(loaders, "loaders")
    if {keyword.arg for keyword in call.keywords} & {"drop_last", "batch_sampler", None}:
        raise CannotError("the loader says already what becomes of the last batch")
    source.add_keyword(call, "drop_last=True")


def _broadcast(case: Case) -> None:
    """Let DDP broadcast the buffers again."""
    source = case.source
    wrappers = [call for words, call in source.calls() if _last(words) in _WRAPPERS]
    kept = [call for call in wrappers if _has(call, "broadcast_buffers", value=False)]
    source.remove_keyword(_only(kept, "wrappers with broadcast_buffers=False"), "broadcast_buffers")


def _find_unused(case: Case) -> None:
    """Let DDP look in each forward for the parameters that it did not use."""
    call = _wrapper(case.source)
    given = {keyword.arg for keyword in call.keywords}
    if given & {"find_unused_parameters", "static_graph", None}:
        raise CannotError("the wrapper is told already what to expect of unused parameters")
    case.source.add_keyword(call, "find_unused_parameters=True")


def _seed(case: Case) -> None:
    """Give each rank random numbers of its own, once the models are alike."""
    source = case.source
    if case.finding.subject not in {(), ("torch",)}:
        raise CannotError(f"the random numbers are those of {case.finding.subject[0]}")
    _need_torch(source)
    wrapped = source.statement_of(_wrapper(source))
    source.insert("torch.manual_seed(torch.initial_seed() + torch.distributed.get_rank())", after=wrapped)


def _through_wrapper(case: Case) -> None:
    """Call the wrapper, which reduces the gradients, and not the model inside of it."""
    source = case.source
    found = [call for words, call in source.calls(case.statement) if _last(words) == "module"]
    call = _only(found, "calls of a wrapper's module on this line")
    assert isinstance(call.func, ast.Attribute)
    source.replace(call.func, source.words(call.func.value))


def _name_of(source: Source, call: ast.Call) -> str:
    statement = source.statement_of(call)
    if isinstance(statement, ast.Assign) and statement.value is call and len(statement.targets) == 1:
        return ast.unparse(statement.targets[0])
    raise CannotError(f"what {ast.unparse(call.func)}(...) makes has no name")


def _is_named(statement: ast.Assign, name: str) -> bool:
    return [ast.unparse(target) for target in statement.targets] == [name]


def _nn(source: Source) -> str:
    """Return by what name the file knows `torch.nn`."""
    for node in source.tree.body:
        names = node.names if isinstance(node, ast.Import | ast.ImportFrom) else ()
        whence = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        for each in names:
            if f"{whence}{each.name}" == "torch.nn" and (each.asname or whence):
                return each.asname or each.name
    _need_torch(source)
    return "torch.nn"


def _operand(source: Source, node: ast.expr) -> str:
    """Return an expression's text, in brackets where a method of it would bind closer than what is in it."""
    text = source.words(node)
    return text if isinstance(node, ast.Name | ast.Attribute | ast.Subscript | ast.Call) else f"({text})"


def _keyword(call: ast.Call, name: str) -> str:
    return next((ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg == name), "")


def _arguments(node: ast.expr) -> list[str]:
    return [ast.unparse(argument) for argument in node.args] if isinstance(node, ast.Call) else []


CURES: dict[str, Cure] = {
    "DATA901": _own_share,
    "DATA902": _set_epoch,
    "FAIL1001": _find_unused,
    "FAIL1016": _no_devices,
    "FAIL1030": _without_prefix,
    "FAIL1034": _update_scale,
    "FAIL1043": _inside,
    "FAIL1044": _whole_batches,
    "MEM403": _detach,
    "RANK102": _broadcast,
    "RANK110": _seed,
    "RCP802": _no_softmax,
    "RCP804": _train_again,
    "RCP806": _schedule_later,
    "RCP808": _clear,
    "RCP809": _divide,
    "RCP813": _unscale,
    "RCP816": _clear_later,
    "RCP817": _register,
    "RCP819": _same_shape,
    "SYNC202": _through_wrapper,
}
#: Codes whose cure stands elsewhere than at the finding's line: in the file of the script, where one place fits.
ELSEWHERE = frozenset(
    {"DATA901", "DATA902", "FAIL1001", "FAIL1016", "FAIL1044", "RANK102", "RANK110", "RCP802", "RCP817"}
)


def cure(data: bytes, finding: Finding, line: int | None) -> tuple[Source, str]:
    """Return the changed source of a finding's file, and a description of the change.

    Raises:
        CannotError: there is no mechanical cure, or no one place for it.
    """
    found = CURES.get(finding.code)
    if found is None:
        raise CannotError(f"{finding.code} has no mechanical cure; see ddpdebug explain {finding.code}")
    if finding.phase is not None and finding.code.startswith(("DATA", "RCP")):
        raise CannotError(f"{finding.title}: that has no mechanical cure")
    source = Source(data)
    found(Case(source, finding, line))
    source.changed()
    return source, (found.__doc__ or "").strip()
