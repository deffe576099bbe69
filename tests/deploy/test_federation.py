"""A real deployment on loopback: a SuperLink behind its proxy, and two SuperNodes."""

from pathlib import Path

from helpers.federations import ENCODERS
from helpers.rehearse import ONE_ROUND, assert_same_as_in_process, deployed, to_the_end
from hetero_ssfl.deploy import nginx
from hetero_ssfl.deploy.local import Rehearsal


def test_two_supernodes_give_the_same_numbers_as_in_process(tmp_path: Path) -> None:
    """No cheaper test shows that Flower's programs, TLS and the proxy change no bit."""
    with Rehearsal(deployed(tmp_path / "there", *ONE_ROUND, encoders=ENCODERS[:2])) as rehearsal:
        assert rehearsal.proxied == (nginx.program() is not None)
        assert_same_as_in_process(to_the_end(rehearsal), tmp_path / "here", ENCODERS[:2])
