"""The checker: sees every torch operation of every thread, and says whose access it is."""

import contextlib

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tests.zenflow.races.clocks import LOCK, Stream, Threads
from tests.zenflow.races.shadow import Memory, place

_GATHERS = ("aten::index_select", "aten::index_copy_")
"""Operations on some rows or columns alone."""
_SHAPES = ("aten::empty_like", "aten::new_empty")
"""Operations that look at a tensor's shape alone."""
_READ_BACK = ("aten::_local_scalar_dense", "aten::nonzero")
"""Operations for whose result the host waits."""


@contextlib.contextmanager
def replaced(owner, name, new):
    """Let an attribute be another one for a while; yield the one that it was."""
    own = name in vars(owner)
    old = vars(owner)[name] if own else getattr(owner, name)
    setattr(owner, name, new)
    try:
        yield old
    finally:
        if own:
            setattr(owner, name, old)
        else:
            delattr(owner, name)


class Event:
    """A place in a stream, as torch.cuda.Event."""

    def __init__(self, checker, clock):
        self._checker, self.clock = checker, clock

    def synchronize(self):
        self._checker.thread.learn(self.clock)

    def elapsed_time(self, other):
        return 0.0


class Checker:
    """Agents, memory, and the races among them.

    Device memory is ordinary memory that is marked as such: the device's operations are those on
    it, in the order of the stream that the calling thread launches on.

    Attributes:
        waits: Operations for which a thread has waited until the device had done them.
    """

    def __init__(self):
        self.memory = Memory()
        self.waits = []
        self.streams = []
        self._threads = Threads()
        self.compute = self.new_stream("compute")

    @property
    def races(self):
        """Texts of what was found."""
        with LOCK:
            self.memory.sweep()
            return list(self.memory.races)

    @property
    def thread(self):
        """The calling thread."""
        return self._threads.agent

    @property
    def stream(self):
        """The stream that the calling thread launches on."""
        return self._threads.stream or self.compute

    @stream.setter
    def stream(self, stream):
        self._threads.stream = stream

    def new_stream(self, name=None):
        stream = Stream(name or f"stream {len(self.streams)}")
        self.streams.append(stream)
        return stream

    def on_device(self, tensor):
        """Mark a tensor's memory as the device's, and return the tensor."""
        if tensor.numel():
            with LOCK:
                self.memory.shadow(tensor, on_device=True, stream=self.stream)
        return tensor

    def is_on_device(self, tensor):
        with LOCK:
            return tensor.numel() > 0 and self.memory.shadow(tensor).on_device

    def watch(self):
        """Return the mode in which the calling thread's operations are seen."""
        return _Watch(self)

    # ---- accesses -----------------------------------------------------------------------------

    def host_access(self, accesses):
        """Note what the calling thread does to memory: pairs of tensor and whether it writes."""
        with LOCK:
            self.thread.tick()
            for tensor, writes in accesses:
                self.memory.access(self.thread, tensor, place(), writes=writes)

    def device_access(self, name, accesses):
        """Note what a kernel does that torch has not launched: as `host_access`, by the stream."""
        with LOCK:
            agent = self.stream.launch(self.thread)
            for tensor, writes in accesses:
                self.memory.access(agent, tensor, f"{name} @ {place()}", writes=writes)

    def operation(self, schema, args, kwargs, out):
        """Note an operation that torch has done."""
        with LOCK:
            self._operation(schema, args, kwargs, out)

    def _operation(self, schema, args, kwargs, out):
        inputs = list(_inputs(schema, args, kwargs))
        storages = {t.untyped_storage().data_ptr() for t, _, _ in inputs}
        kinds = [
            self.memory.shadow(t).on_device
            for t, _, _ in inputs
            if t.dim() or self.memory.shadow(t).on_device  # a number comes with the launch
        ]
        is_device, is_mixed = any(kinds), any(kinds) and not all(kinds)
        made = [t for t in _tensors(out) if t.untyped_storage().data_ptr() not in storages]
        for tensor in made:
            stream = self.stream if is_device else None
            self.memory.shadow(tensor, on_device=is_device, stream=stream, is_new=True)
        if all(is_view for _, _, is_view in inputs) or schema.name in _SHAPES:
            return  # a view, or memory that nobody has written
        agent = self.thread
        if is_device:
            agent = self.stream.launch(self.thread)
        else:
            agent.tick()
        op = f"{schema.name.removeprefix('aten::')} @ {place()}"
        for tensor, writes in [*self._accesses(schema, args, inputs), *((t, True) for t in made)]:
            self.memory.access(agent, tensor, op, writes=writes)
        blocks = is_mixed and not _is_non_blocking(schema, args, kwargs)
        if is_device and (blocks or schema.name in _READ_BACK):
            self.waits.append(op)
            self.thread.learn(agent.clock)
        self.memory.sweep()

    def _accesses(self, schema, args, inputs):
        if schema.name in _GATHERS:
            tensor, dim, index = args[:3]
            writes = schema.name == "aten::index_copy_"
            parts = [(tensor.select(dim, int(i)), writes) for i in index.numpy()]
            others = [(t, w) for t, w, _ in inputs if t is not tensor and t is not index]
            return [*parts, (index, False), *others]
        return [
            (t, writes)
            for t, writes, is_view in inputs
            if not is_view and (t.dim() or self.memory.shadow(t).on_device)
        ]


class _Watch(TorchDispatchMode):
    def __init__(self, checker):
        super().__init__()
        self._checker = checker

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func._schema.name != "aten::record_stream":
            self._checker.operation(func._schema, args, kwargs or {}, out)
        return out


def _tensors(value):
    return [
        t
        for t in pytree.tree_leaves(value)
        if isinstance(t, torch.Tensor)
        and type(t) in (torch.Tensor, torch.nn.Parameter)
        and t.layout == torch.strided
        and t.untyped_storage().data_ptr()
    ]


def _inputs(schema, args, kwargs):
    """Yield (tensor, whether it is written, whether only a view of it is made)."""
    for place_of, argument in enumerate(schema.arguments):
        value = args[place_of] if place_of < len(args) else kwargs.get(argument.name)
        alias = argument.alias_info
        writes = alias is not None and alias.is_write
        for tensor in _tensors(value):
            yield tensor, writes, alias is not None and not alias.is_write


def _is_non_blocking(schema, args, kwargs):
    if schema.name != "aten::copy_":
        return True  # an operation on both is launched; only copies wait
    return bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
