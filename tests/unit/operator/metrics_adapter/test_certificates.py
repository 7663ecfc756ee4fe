"""Certificates that the adapter makes, checked by the TLS that clients use."""

import socket
import ssl
import threading
from datetime import timedelta
from pathlib import Path

import pytest

from epd_operator.metrics_adapter.certificates import (
    Pair,
    is_due,
    make_authority,
    sign,
    still_valid,
    utc_now,
)
from epd_operator.metrics_adapter.tls import Tls

NAME = "adapter.epd-system.svc"


@pytest.fixture(scope="module")
def authority() -> Pair:
    return make_authority(utc_now())


def connect(tls: Tls, trusted: bytes, name: str = NAME, client: Path | None = None) -> dict[str, object]:
    """A handshake over a real socket pair; what the server knows of the client's certificate."""
    ours, theirs = socket.socketpair()
    context = ssl.create_default_context(cadata=trusted.decode())
    if client is not None:
        context.load_cert_chain(client)
    known: dict[str, object] = {}

    def serve() -> None:
        try:
            with tls.context.wrap_socket(theirs, server_side=True) as server:
                known.update(server.getpeercert() or {})
                server.sendall(b"ok")
        except OSError as error:
            known["error"] = error

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with context.wrap_socket(ours, server_hostname=name) as connection:
            assert connection.recv(2) == b"ok", known
    finally:
        ours.close()
        thread.join()
    return known


def test_clients_that_trust_the_authority_accept_its_serving_certificates(authority: Pair) -> None:
    tls = Tls()
    tls.use(sign(authority, [NAME], utc_now(), timedelta(days=1)), "")
    assert connect(tls, authority.certificate) == {}
    with pytest.raises(ssl.SSLCertVerificationError):
        connect(tls, authority.certificate, name="other.epd-system.svc")
    with pytest.raises(ssl.SSLCertVerificationError):
        connect(tls, make_authority(utc_now()).certificate)


def test_a_new_certificate_and_a_new_trust_count_from_the_next_connection_on(
    authority: Pair, tmp_path: Path
) -> None:
    """Of a client authority that no longer counts, no certificate is let in: the listener stays the same."""
    fronts = [make_authority(utc_now()) for _ in range(2)]
    files = []
    for number, front in enumerate(fronts):
        pair = client_certificate(front)
        file = tmp_path / f"client-{number}.pem"
        file.write_bytes(pair.key + pair.certificate)
        files.append(file)
    tls, renewed = Tls(), make_authority(utc_now())
    tls.use(sign(authority, [NAME], utc_now(), timedelta(days=1)), fronts[0].certificate.decode())
    assert "subject" in connect(tls, authority.certificate, client=files[0])
    assert connect(tls, authority.certificate) == {}, "a certificate is not needed"
    with pytest.raises((OSError, AssertionError)):
        connect(tls, authority.certificate, client=files[1])

    tls.use(sign(renewed, [NAME], utc_now(), timedelta(days=1)), fronts[1].certificate.decode())
    assert "subject" in connect(tls, renewed.certificate, client=files[1])
    with pytest.raises((OSError, AssertionError)):
        connect(tls, renewed.certificate, client=files[0])
    with pytest.raises(ssl.SSLCertVerificationError):
        connect(tls, authority.certificate)


def client_certificate(authority: Pair) -> Pair:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    issuer_key = serialization.load_pem_private_key(authority.key, None)
    assert isinstance(issuer_key, ec.EllipticCurvePrivateKey)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "aggregator")])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(authority.parsed.subject)
    builder = builder.public_key(key.public_key()).serial_number(7)
    builder = builder.not_valid_before(utc_now() - timedelta(hours=1)).not_valid_after(
        utc_now() + timedelta(days=1)
    )
    made = builder.sign(issuer_key, hashes.SHA256())
    encoding, private = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return Pair(
        made.public_bytes(encoding), key.private_bytes(encoding, private, serialization.NoEncryption())
    )


def test_a_certificate_is_due_when_two_thirds_of_its_life_are_over(authority: Pair) -> None:
    now = utc_now()
    made = sign(authority, [NAME], now, timedelta(days=30)).certificate
    assert not is_due(made, now + timedelta(days=19))
    assert is_due(made, now + timedelta(days=21))
    assert is_due(b"nonsense", now)


def test_a_bundle_loses_what_has_run_out(authority: Pair) -> None:
    now = utc_now()
    old = make_authority(now - timedelta(days=2), timedelta(days=1))
    assert still_valid(authority.certificate + old.certificate, now) == [authority.certificate]
    assert still_valid(b"nonsense", now) == []


def test_a_key_that_is_not_the_authoritys_is_refused(authority: Pair) -> None:
    mixed = Pair(authority.certificate, make_authority(utc_now()).key)
    with pytest.raises(ValueError, match="not that of its certificate"):
        sign(mixed, [NAME], utc_now(), timedelta(days=1))
