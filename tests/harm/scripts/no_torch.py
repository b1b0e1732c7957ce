import random
import sys

random.seed(0)
print(random.random(), "torch" in sys.modules, "numpy" in sys.modules, [m for m in sys.modules if m.startswith("osler")])
sys.exit(4)
