"""Memory, speed and a real training job, measured side by side: ``python -m bench``."""

import os

# The profiler's library writes a line to stderr whenever it starts or stops, across the progress
# bar. It reads this once, when torch loads it.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
