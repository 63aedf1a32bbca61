"""What a process that tests start loads first: stand-ins for parts of torch that none uses.

Every optimizer asks the compiler to leave its functions alone, and loading it takes a second.
Export and shapes without data, which torch always loads, take a quarter of its time.
"""

import sys
from types import ModuleType

compiler = ModuleType("torch._dynamo")
compiler.disable = lambda function, *_, **__: function
for module in (compiler, ModuleType("torch._meta_registrations"), ModuleType("torch.export")):
    sys.modules[module.__name__] = module
