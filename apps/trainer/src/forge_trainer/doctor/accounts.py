"""Checks of credentials and services: Weights & Biases, the Hugging Face hub."""

from __future__ import annotations

import http.client
import netrc
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from forge_trainer.doctor.finding import Finding, fine

ANSWER_S = 5.0
"""The longest time for the answer of a server."""


def wandb_findings(environ: Mapping[str, str] = os.environ) -> list[Finding]:
    """Check Weights & Biases: the key and the server."""
    url = environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    if environ.get("WANDB_MODE") in ("offline", "disabled"):
        return [fine("wandb", f"WANDB_MODE={environ['WANDB_MODE']}: nothing is sent")]
    return [_wandb_key(url, environ), _answers("wandb server", url, 'track.wandb.mode = "offline"')]


def hub_findings(environ: Mapping[str, str] = os.environ) -> list[Finding]:
    """Check the Hugging Face hub: the token, the server and the cache."""
    home = Path(environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    cached = sorted(path.name for path in (home / "hub").glob("*--*")) if (home / "hub").is_dir() else []
    kept = fine("hub cache", f"{len(cached)} models and data sets in {home / 'hub'}")
    if environ.get("HF_HUB_OFFLINE", "0") not in ("0", ""):
        return [kept, fine("hub", "HF_HUB_OFFLINE: only the cache is read")]
    return [kept, _hub_token(home, environ), _answers("hub", environ.get("HF_ENDPOINT", "https://huggingface.co"),
            "fetch on a machine with a network, share HF_HOME, and set HF_HUB_OFFLINE=1")]  # fmt: skip


def _wandb_key(url: str, environ: Mapping[str, str]) -> Finding:
    host = _host(url)
    if environ.get("WANDB_API_KEY"):
        return fine("wandb key", "WANDB_API_KEY")
    place = Path(environ.get("NETRC", Path.home() / ".netrc"))
    try:
        found = netrc.netrc(place).authenticators(host)
    except (OSError, UnicodeDecodeError, netrc.NetrcParseError):
        found = None
    if found is not None:
        return fine("wandb key", f"for {host} in {place}")
    why = "a run that is to report online would keep its numbers in files"
    return Finding("wandb key", "wrong", f"none for {host}", why, "wandb login, or export WANDB_API_KEY")


def _hub_token(home: Path, environ: Mapping[str, str]) -> Finding:
    if environ.get("HF_TOKEN"):
        return fine("hub token", "HF_TOKEN")
    path = Path(environ.get("HF_TOKEN_PATH", home / "token"))
    if path.is_file():
        return fine("hub token", str(path))
    why = "gated models, such as Llama, cannot be fetched"
    return Finding("hub token", "warning", "none", why, "hf auth login, or export HF_TOKEN")


def _host(url: str) -> str:
    """Return the host of an http address; empty if it is no such address."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # refuses what is no number
    except ValueError:
        return ""
    return (parts.hostname or "") if parts.scheme in ("http", "https") else ""


def _answers(name: str, url: str, remedy: str) -> Finding:
    """Check whether a server answers at all, with any status."""
    if not _host(url):
        return Finding(name, "wrong", f"{url} is no address", "it should be https:// and a host", remedy)
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=ANSWER_S):
            return fine(name, f"{url} answers")
    except urllib.error.HTTPError as error:
        return fine(name, f"{url} answers ({error.code})")
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        why = "compute nodes of many clusters reach no server outside"
        return Finding(name, "warning", f"{url} does not answer: {reason}", why, remedy)
