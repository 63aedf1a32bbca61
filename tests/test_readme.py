"""The README's example runs as it stands."""

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_readmes_example_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(code.splitlines()) <= 25
    exec(compile(code, str(README), "exec"), {})
    loss, stall_seconds = capsys.readouterr().out.split()[-2:]
    assert 0 < float(loss) < 1
    assert float(stall_seconds) >= 0
