"""The four training workloads, written from their published specifications."""
