"""Draw the pictures of docs/findings: ``python -m tests.others``."""

from __future__ import annotations

import os
import warnings

from pytest_roseinfer import settings

if __name__ == "__main__":
    os.environ.setdefault("TRITON_INTERPRET", "1")
    warnings.simplefilter("ignore")
    settings.set_current(settings.Settings(seed=1))
    from tests.others.picture import file_of
    from tests.others.pictures import PICTURES

    for name, picture in PICTURES.items():
        if picture.can_be_drawn():
            file_of(name).write_text(picture.draw(), encoding="utf-8")
            print(file_of(name), flush=True)
        else:
            print(f"{name}: {picture.project} is not fetched", flush=True)
