"""CIFAR-10 on a small machine: two classifiers, the documented loop and a fitted one."""
