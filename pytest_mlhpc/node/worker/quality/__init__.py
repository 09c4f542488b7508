"""Training until a quality is reached, after the rules of MLPerf HPC: staging, training epochs, evaluations."""
