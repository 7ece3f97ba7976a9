"""See the package: version 0.1.0 kept its replicas here."""

fleet = None
