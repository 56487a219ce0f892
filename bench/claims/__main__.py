"""See the package."""
from bpsfast.bench.claims import main

if __name__ == "__main__":
    main()
