"""What is given: hardware, model, workload. Facts only; conclusions are functions on the floors above."""
