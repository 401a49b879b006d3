"""Training steps of a policy's model on several GPUs of this machine: `loka bench model POLICY --gpus N`."""
