"""Private names of aiortc and aioice, all of them; each is looked for before it is used.

Tested with aiortc 1.16 and aioice 0.13. Where a name is missing, the documented behaviour is what
remains, and the log says so once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import aioice.ice
from aiortc import RTCRtpSender

logger = logging.getLogger(__name__)


def on_key_frame_request(sender: RTCRtpSender, callback: Callable[[], None]) -> bool:
    """Calls `callback` for each PLI and FIR that a sender receives.

    aiortc keeps such requests for its own encoders; tracks that give packets never hear of them.

    Returns:
        Whether that is possible; otherwise only the periodic key frames are made.
    """
    if not callable(getattr(sender, "_send_keyframe", None)):
        logger.warning("aiortc changed: key frames are made every 2 s only, not on request")
        return False
    target: Any = sender
    target._send_keyframe = callback
    return True


def gather_addresses(addresses: tuple[str, ...]) -> bool:
    """Makes ICE of this process offer exactly these host addresses.

    aioice leaves out loopback addresses, so a server for this machine alone would have to open
    ports on others.

    Returns:
        Whether that is possible; otherwise aioice's own choice holds.
    """
    if not callable(getattr(aioice.ice, "get_host_addresses", None)):
        logger.warning("aioice changed: media uses all addresses of this machine")
        return False

    def chosen(use_ipv4: bool, use_ipv6: bool) -> list[str]:
        return [a for a in addresses if (use_ipv6 if ":" in a else use_ipv4)]

    module: Any = aioice.ice
    module.get_host_addresses = chosen
    return True
