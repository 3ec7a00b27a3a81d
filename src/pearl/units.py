"""Units of measure used in names and reports.

Every quantity carries its unit as a suffix: `_s` seconds, `_tokens`, `_bytes`, `_gpus`. There is no other time unit in
the code base; conversions happen only where a foreign interface speaks another one.
"""

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB


def format_bytes(size_bytes: int) -> str:
    """Render a size for people, in binary units: `1.5 GiB`."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.1f} {name}"
    return f"{size_bytes} B"


def format_duration(seconds: float) -> str:
    """Render a duration for people: `2 h 03 min`, `4 min 05 s`, `1.2 s`."""
    if seconds >= 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"
    if seconds >= 60:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    return f"{seconds:.1f} s"
