"""A real deployment on loopback: a SuperLink behind its proxy, and two SuperNodes."""

from pathlib import Path

from helpers.deployments import ONE_ROUND, assert_same_as_in_process, deployed, to_the_end
from helpers.federations import ENCODERS
from hetero_ssfl.deploy import nginx
from hetero_ssfl.deploy.local import LocalDeployment


def test_two_supernodes_give_the_same_numbers_as_in_process(tmp_path: Path) -> None:
    """No cheaper test shows that Flower's programs, TLS and the proxy change no bit."""
    with LocalDeployment(deployed(tmp_path / "there", *ONE_ROUND, encoders=ENCODERS[:2])) as running:
        assert running.proxied == (nginx.program() is not None)
        assert_same_as_in_process(to_the_end(running), tmp_path / "here", ENCODERS[:2])
