"""Hosts in words, and drawn with their slots, at most 80 columns wide."""

from functools import singledispatch

from esper.kasmina.hosts.cnn import CNNHostSpec
from esper.kasmina.hosts.host import HostSpec, InjectionPoint
from esper.kasmina.hosts.module_host import ModuleHostSpec
from esper.kasmina.hosts.transformer import TransformerHostSpec
from esper.tasks.registry import TaskSpec

Part = str | InjectionPoint
"""Layers in words, or a slot after them."""


@singledispatch
def words(host: HostSpec) -> str:
    """A host in a few words; others by the name of their class."""
    return type(host).__name__


@words.register
def _(host: CNNHostSpec) -> str:
    unshuffle = f", unshuffle {host.unshuffle}" if host.unshuffle > 1 else ""
    return f"CNN {'-'.join(map(str, host.channels()))}, {host.kernel}x{host.kernel}{unshuffle}"


@words.register
def _(host: TransformerHostSpec) -> str:
    return f"transformer {host.layers}x{host.width}"


@words.register
def _(host: ModuleHostSpec) -> str:
    return getattr(host.model, "__name__", type(host.model).__name__)


@singledispatch
def parts(host: HostSpec) -> list[Part]:
    """A host from the input to the output; of others than the built-in ones the slots alone are known."""
    in_order = sorted(host.points(), key=lambda point: point.position)
    return ["input", *(part for point in in_order for part in ("layers", point)), "layers", "output"]


@parts.register
def _(host: CNNHostSpec) -> list[Part]:
    points = {point.slot_id: point for point in host.points()}
    found: list[Part] = [f"images, {host.in_channels} channel{'s' * (host.in_channels > 1)}"]
    if host.unshuffle > 1:
        found.append(f"pixel unshuffle {host.unshuffle}x{host.unshuffle}: {host.input_channels()} channels")
    for block in range(host.blocks):
        found += [f"convolution {host.kernel}x{host.kernel}, batch norm, ReLU", points[f"r0c{block}"]]
        if block < host.pools:
            found += ["max pooling 2x2", points[f"r1c{block}"]]
    return [*found, "mean over space, linear", f"{host.classes} classes"]


@parts.register
def _(host: TransformerHostSpec) -> list[Part]:
    layers = host.layers // host.segments
    segment = f"{layers} layer{'s' * (layers > 1)}: attention ({host.heads} heads), MLP ({4 * host.width})"
    found: list[Part] = [f"up to {host.context} tokens", f"token and position embedding ({host.width})"]
    found += [part for point in host.points() for part in (segment, point)]
    return [*found, "layer norm, token table", f"logits of {host.vocabulary} tokens"]


def drawing(task: TaskSpec) -> list[str]:
    """The lines of a host with its slots, the enabled ones filled."""
    if task.host is None:
        return [f"no network; formulas with up to {len(task.offered)} slots"]
    first, *inner, last = parts(task.host)
    lines = [str(first)]
    for part in inner:
        if isinstance(part, str):
            lines.append(f"  │  {part}")
        else:
            mark = "●" if part.slot_id in task.enabled else "○"
            lines.append(f"  {mark} {part.slot_id}   {part.channels} channels")
    others = "" if set(task.offered) == set(task.enabled) else "   ○ others: --set 'slots=[\"SLOT\", ...]'"
    return [*lines, str(last), "", f"● slots of a run{others}"]
