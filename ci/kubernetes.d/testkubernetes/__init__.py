"""A real Kubernetes on one machine: etcd, the control plane, and nodes of kubelet, containerd, runc. Standard library only."""
