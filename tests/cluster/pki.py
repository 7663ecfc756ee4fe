"""Certificates, tokens and kubeconfigs of one cluster."""

import base64
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from .command import Word, run

DAYS = "3650"
FRONT_CA = "front-ca"
"""Signs only the aggregator's client certificate: an extension API trusts user names that come with it."""


@dataclass(frozen=True)
class Identity:
    """Who may log in, by a token of their own."""

    name: str
    user: str
    group: str = ""


IDENTITIES = (
    Identity("admin", "admin", "system:masters"),
    Identity("controller-manager", "system:kube-controller-manager"),
    Identity("scheduler", "system:kube-scheduler"),
    Identity("node", "system:node:node1", "system:nodes"),
    Identity("proxy", "system:kube-proxy"),
)


class Pki:
    """Made once, in the cluster's state directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def path(self, name: str) -> Path:
        """A file: `ca.crt`, `server.key`, `tokens.csv`, ..."""
        return self._directory / name

    def kubeconfig(self, identity: str) -> Path:
        """The kubeconfig of one of the identities."""
        return self._directory / f"{identity}.kubeconfig"

    def create(self, server: str, names: Sequence[str]) -> None:
        """Everything at once. `names` are what the API server is called, as openssl writes them."""
        self._directory.mkdir(mode=0o700, parents=True)
        for authority in ("ca", FRONT_CA):
            self._certificate(authority, f"/CN={authority}", ["basicConstraints=critical,CA:TRUE"])
        self._certificate("server", "/CN=kube-apiserver", [f"subjectAltName={','.join(names)}"], "ca")
        client = ["extendedKeyUsage=clientAuth"]
        self._certificate("kubelet-client", "/O=system:masters/CN=apiserver-kubelet-client", client, "ca")
        self._certificate("aggregator", "/CN=aggregator", client, FRONT_CA)
        run(["openssl", "genrsa", "-out", self.path("sa.key"), "2048"])
        run(["openssl", "rsa", "-in", self.path("sa.key"), "-pubout", "-out", self.path("sa.pub")])
        self._tokens(server)

    def _certificate(
        self, name: str, subject: str, extensions: list[str], authority: str | None = None
    ) -> None:
        config = self.path(f"{name}.cnf")
        identifiers = ["subjectKeyIdentifier=hash", "authorityKeyIdentifier=keyid"]
        config.write_text(
            "\n".join(["[req]", "distinguished_name=dn", "[dn]", "[v3]", *identifiers, *extensions])
        )
        signer: list[Word] = []
        if authority is not None:
            signer = ["-CA", self.path(f"{authority}.crt"), "-CAkey", self.path(f"{authority}.key")]
        key: list[Word] = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        files: list[Word] = ["-keyout", self.path(f"{name}.key"), "-out", self.path(f"{name}.crt")]
        options: list[Word] = [
            "-x509",
            "-config",
            config,
            "-extensions",
            "v3",
            "-subj",
            subject,
            "-days",
            DAYS,
        ]
        run(["openssl", "req", *options, *key, *files, *signer])

    def _tokens(self, server: str) -> None:
        rows = []
        for number, identity in enumerate(IDENTITIES):
            token = secrets.token_hex(24)
            rows.append(f'{token},{identity.user},{number},"{identity.group}"')
            self.kubeconfig(identity.name).write_text(self._kubeconfig(server, token))
        self.path("tokens.csv").write_text("\n".join(rows) + "\n")

    def _kubeconfig(self, server: str, token: str) -> str:
        authority = base64.b64encode(self.path("ca.crt").read_bytes()).decode()
        return yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [
                    {"name": "epd", "cluster": {"server": server, "certificate-authority-data": authority}}
                ],
                "users": [{"name": "epd", "user": {"token": token}}],
                "contexts": [{"name": "epd", "context": {"cluster": "epd", "user": "epd"}}],
                "current-context": "epd",
            }
        )
