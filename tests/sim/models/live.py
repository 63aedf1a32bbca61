"""Bytes of tensors that a forward of torch leaves alive for its backward."""

from collections import Counter

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Watch(TorchDispatchMode):
    """Sees every operation, and what it allocates."""

    def __init__(self):
        super().__init__()
        self.operations = Counter()
        self.products = []
        self._seen = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.operations[func] += 1
        if func == torch.ops.aten.mm.default:
            self.products.append((*args[0].shape, args[1].shape[1]))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                known = self._seen.get(storage._cdata)
                if known is None or known[0].expired():
                    self._seen[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    def live(self, *others):
        """Return the sizes of what is alive, but for these tensors'."""
        known = {tensor.untyped_storage()._cdata for tensor in others}
        seen = ((key, *item) for key, item in self._seen.items() if key not in known)
        return [size for _, reference, size in seen if not reference.expired()]


def kept_bytes(module, *args, least=0):
    """Return the output of a forward, and the bytes of larger tensors that it leaves alive.

    Parameters, inputs and the output are left out, and tensors of at most ``least`` bytes.
    """
    with Watch() as watch:
        out = module(*args)
    found = watch.live(out, *args, *module.parameters())
    return out, sum(size for size in found if size > least)
