"""What only an NVIDIA GPU can show: tests marked `gpu`, and a script that checks and records on a machine that has one."""
