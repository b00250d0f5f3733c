"""Checks the network interfaces for gloo and NCCL."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Mapping

from forge_trainer.doctor.finding import Finding, fine, skipped

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
ADDRESS_OF_INTERFACE = 0x8915
"""SIOCGIFADDR of Linux."""


def network_findings(environ: Mapping[str, str] = os.environ) -> list[Finding]:
    """List the interfaces with an address, and check that the variables that choose one name one of them."""
    try:
        found = {name: address for _, name in socket.if_nameindex() if (address := address_of(name))}
    except OSError as error:
        return [skipped("interfaces", str(error))]
    outside = {name: address for name, address in found.items() if not address.startswith("127.")}
    listed = ", ".join(f"{name} {address}" for name, address in found.items()) or "none has an address"
    findings = [fine("interfaces", listed)]
    if not outside:
        why = "ranks of several nodes cannot reach each other"
        findings = [Finding("interfaces", "warning", listed, why, "ask who runs the cluster")]
    for name in VARIABLES:
        # NCCL takes prefixes, with ^ for those to leave out and = for exact names
        asked = [one.lstrip("^=") for one in environ.get(name, "").split(",") if one.lstrip("^=")]
        if asked and not any(one.startswith(wanted) for one in found for wanted in asked):
            why = "ranks would wait for each other until a time-out"
            findings.append(
                Finding(name, "wrong", f"{environ[name]}, which is none of them", why, f"one of {listed}")
            )
        elif len(outside) > 1 and not asked:
            why = "a wrong guess makes ranks of several nodes wait until a time-out, or use the slow network"
            remedy = (
                f"if they do: export {name}={next(iter(outside))} (a line of `setup` in the cluster file)"
            )
            findings.append(Finding(name, "warning", f"not set; {len(outside)} to guess from", why, remedy))
    return findings


def address_of(interface: str) -> str | None:
    """Return the IPv4 address of an interface; None if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface[:15].encode())
        try:
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), ADDRESS_OF_INTERFACE, request)[20:24])
        except OSError:
            return None
