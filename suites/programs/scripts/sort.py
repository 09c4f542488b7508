"""Sort a million numbers five times; print each rate as a JSON line."""

import json
import random
import time

numbers = [random.random() for _ in range(1_000_000)]
for _ in range(5):
    start = time.perf_counter()
    sorted(numbers)
    print(json.dumps({"metric": "sorted", "value": len(numbers) / (time.perf_counter() - start)}))
