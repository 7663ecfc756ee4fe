"""Pure: the certificates that the adapter serves with, made by itself.

One authority is shared by all replicas through a Secret, and its certificate is what the API server trusts.
Each replica signs its own serving certificate with it, so that renewing one concerns nobody else.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY_AGE = timedelta(days=3650)
_CLOCKS_DIFFER = timedelta(minutes=5)
_RENEW_AT = 2 / 3


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, in PEM."""

    certificate: bytes
    key: bytes

    @property
    def parsed(self) -> x509.Certificate:
        """The certificate. Raises ValueError for what is none."""
        return x509.load_pem_x509_certificate(self.certificate)


def make_authority(now: datetime, age: timedelta = AUTHORITY_AGE) -> Pair:
    """A new authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name(f"epd-metrics-adapter {now.strftime('%Y-%m-%dT%H:%M:%SZ')}")
    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        crl_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    certificate = (
        _builder(name, name, key, now, age)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(key, hashes.SHA256())
    )
    return _pair(certificate, key)


def sign(authority: Pair, names: Sequence[str], now: datetime, age: timedelta) -> Pair:
    """A serving certificate for some DNS names. Raises ValueError for an authority that is none."""
    issuer = authority.parsed
    issuer_key = serialization.load_pem_private_key(authority.key, None)
    if (
        not isinstance(issuer_key, ec.EllipticCurvePrivateKey)
        or issuer_key.public_key() != issuer.public_key()
    ):
        raise ValueError("the authority's key is not that of its certificate")
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        _builder(_name(names[0][:64]), issuer.subject, key, now, age)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(issuer_key, hashes.SHA256())
    )
    return _pair(certificate, key)


def is_due(certificate: bytes, now: datetime) -> bool:
    """Whether a certificate should be replaced: two thirds of its life are over, or it cannot be read."""
    try:
        found = x509.load_pem_x509_certificate(certificate)
    except ValueError:
        return True
    begin = found.not_valid_before_utc + _CLOCKS_DIFFER
    return now >= begin + (found.not_valid_after_utc - begin) * _RENEW_AT


def still_valid(bundle: bytes, now: datetime) -> list[bytes]:
    """Those certificates of a bundle that have not run out, each in PEM; none of a bundle that is none."""
    try:
        found = x509.load_pem_x509_certificates(bundle)
    except ValueError:
        return []
    return [one.public_bytes(serialization.Encoding.PEM) for one in found if one.not_valid_after_utc > now]


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    now: datetime,
    age: timedelta,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS_DIFFER)
        .not_valid_after(now + age)
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _pair(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Pair:
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Pair(certificate.public_bytes(serialization.Encoding.PEM), private)


def utc_now() -> datetime:
    """Now, in whole seconds as certificates have them."""
    return datetime.now(UTC).replace(microsecond=0)
