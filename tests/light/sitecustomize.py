"""What a process that tests start loads first: a stand-in for torch's compiler.

Every optimizer asks the compiler to leave its functions alone, and loading it takes a second.
Imports make a million objects that stay: the garbage collector need not look through them often.
"""

import gc
import sys
from types import ModuleType

compiler = ModuleType("torch._dynamo")
compiler.disable = lambda function, *_, **__: function
sys.modules[compiler.__name__] = compiler
gc.set_threshold(100_000, 10, 10)
