"""Every error octavo raises on purpose.

OctavoError
├── ConfigError        what was asked for contradicts itself or is out of range: change the call
├── UnsupportedError   asked for correctly, but not possible on this device or implementation
├── CheckpointError    a file of weights, scales or records is damaged or not understood
└── CapacityError      no room left (pages, memory, queue): retry later or ask for less

Messages say what was expected, what came and, when known, what to do.
"""


class OctavoError(Exception):
    """Base of all errors that octavo raises on purpose."""


class ConfigError(OctavoError, ValueError):
    """A request that contradicts itself or is out of range; also a ValueError."""


class UnsupportedError(OctavoError):
    """A valid request that this device, dtype or implementation cannot serve."""


class CheckpointError(OctavoError):
    """A file that is damaged, incomplete or not understood."""


class CapacityError(OctavoError):
    """There is no room left: free something, retry later or ask for less."""
