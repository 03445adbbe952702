"""Spectra in the store: written whole, read whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from sqlalchemy import delete, insert, select

from dofsweep.records import HeadSpectrum
from dofsweep.store.models import SpectraSetRow, SpectrumRow
from dofsweep.store.upsert import upsert
from dofsweep.store.writes import Writes, time_now

EIGENVALUE = np.dtype("<f8")
"""Stored bytes of eigenvalues: float64, little-endian on every machine."""


class SpectraWrites(Writes):
    """Spectra of all heads of a teacher, under the hash of what they depend on."""

    def save_spectra(
        self, key: str, meta: Mapping[str, Any], spectra: Sequence[HeadSpectrum]
    ) -> None:
        """Write a set of spectra in the place of an earlier one with the same key.

        Args:
            key: hash of everything the spectra depend on.
            meta: what that is, as JSON: gram_scale, kernel, n_points, fingerprints, …
            spectra: one of each layer and head.
        """
        rows = [
            {
                "spectra_key": key,
                "layer_idx": int(spectrum.layer_idx),
                "head_idx": int(spectrum.head_idx),
                "eigenvalues": np.asarray(spectrum.values).astype(EIGENVALUE).tobytes(),
                "rank": len(spectrum.values),
                "tail": float(spectrum.tail),
                "n_points": int(spectrum.n_points),
                "resolved": bool(spectrum.resolved),
            }
            for spectrum in spectra
        ]
        assert rows, "a set without spectra"
        with self.store.session() as session:
            head = {
                "key": key,
                "n_spectra": len(rows),
                "meta": dict(meta),
                "created_at": time_now(session),
            }
            upsert(session, SpectraSetRow, [head])  # holds the set, so that one writer goes first
            session.execute(delete(SpectrumRow).where(SpectrumRow.spectra_key == key))
            session.execute(insert(SpectrumRow), rows)

    def load_spectra(self, key: str) -> tuple[dict[str, Any], list[HeadSpectrum]] | None:
        """The set of a key, ordered by layer and head; None if it is not there or not complete."""
        with self.store.reading() as session:
            head = session.get(SpectraSetRow, key)
            rows = session.scalars(
                select(SpectrumRow)
                .where(SpectrumRow.spectra_key == key)
                .order_by(SpectrumRow.layer_idx, SpectrumRow.head_idx)
            ).all()
            if head is None or len(rows) != head.n_spectra:
                return None
            return dict(head.meta), [_spectrum(row) for row in rows]


def _spectrum(row: SpectrumRow) -> HeadSpectrum:
    values = np.frombuffer(row.eigenvalues, dtype=EIGENVALUE).astype(np.float64)
    return HeadSpectrum(
        row.layer_idx, row.head_idx, values, row.tail, row.n_points, resolved=row.resolved
    )
