"""Runs the verification alone, by path, with any Python 3.11: `python -I -S -B .../supplychain/environment
--help`.
"""

import sys
from pathlib import Path

# By path and isolated, nothing of ours is importable yet; this names the folder that holds the package, and
# nothing else.
sys.path[:1] = [str(Path(__file__).resolve().parents[2])]

from supplychain.environment.verify import main  # noqa: E402

sys.exit(main(sys.argv[1:]))
