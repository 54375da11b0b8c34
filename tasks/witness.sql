-- The second ledger: from one day's charges and usage to addresses, spans and layers, in integers, and the differences
-- from the first ledger. Shares no code with tasks/core; knows no file and no clock.
-- Source: infra/rules/ledger.md 1 to 4, which the sections below name.
--
-- In (registered by tasks/witness.py; instants are BIGINT ns UTC, money whole units of 10^-digits, quantities and prices
-- whole units of 1e-12, both as DECIMAL(38, 0)): settings_in, charges_in, device_in, layer_in, attach_in, counts_in, prices_in,
-- marks_in; the ledger under test in addresses_in, layers_in, spans_in.
-- Out: w_addresses, w_spans, w_layers, d_addresses, d_spans, d_layers, w_totals.
-- HUGEINT arithmetic raises on overflow; // cuts toward zero, so it only ever sees amounts without their sign.

SET TimeZone = 'UTC';
SET default_null_order = 'nulls_last';
SET preserve_insertion_order = false;

-- === Numbers (sections 1, 4.4, 4.10) ================================================================================

-- floor(u * w / t) and its remainder. u * w can pass 2^127, so u is taken apart: u = (u // t) * t + u % t.
CREATE TEMP MACRO whole_share(u, w, t) AS (u // t) * w + ((u % t) * w) // t;
CREATE TEMP MACRO rest_share(u, w, t) AS ((u % t) * w) % t;

-- The part of amount u (either sign) in [a, b) of t: it telescopes to u over adjoining intervals (4.4).
CREATE TEMP MACRO telescoped(u, a, b, t) AS sign(u) * (whole_share(abs(u), b, t) - whole_share(abs(u), a, t));

-- n / d rounded half to even; n is not negative.
CREATE TEMP MACRO half_even(n, d) AS
    n // d + CASE WHEN 2 * (n % d) > d OR (2 * (n % d) = d AND (n // d) % 2 = 1) THEN 1 ELSE 0 END;

-- Nanoseconds of a unit of time; null for every other unit.
CREATE TEMP MACRO unit_ns(unit) AS CASE lower(unit)
    WHEN 'hours' THEN 3600000000000 WHEN 'hour' THEN 3600000000000 WHEN 'hrs' THEN 3600000000000
    WHEN 'h' THEN 3600000000000 WHEN 'minutes' THEN 60000000000 WHEN 'seconds' THEN 1000000000 END;

-- Largest remainder over a table of (grp, pos, units, weight): units of a group over its weights, the odd units to the
-- largest remainders, ties to the lowest pos. The weights of a group never add up to zero; the caller sees to it.
CREATE TEMP MACRO largest_remainder(t) AS TABLE
    WITH summed AS (
        SELECT grp, pos, units, weight, sum(weight) OVER (PARTITION BY grp) AS total FROM query_table(t)
    ), based AS (
        SELECT grp, pos, units, whole_share(abs(units), weight, total) AS base,
               rest_share(abs(units), weight, total) AS rest
        FROM summed
    ), ranked AS (
        SELECT grp, pos, units, base, abs(units) - sum(base) OVER (PARTITION BY grp) AS spare,
               row_number() OVER (PARTITION BY grp ORDER BY rest DESC, pos) AS turn
        FROM based
    )
    SELECT grp, pos, sign(units) * (base + CASE WHEN turn <= spare THEN 1 ELSE 0 END) AS part FROM ranked;

-- === Observed time ==================================================================================================

-- A device that is on no known machine has no address. A machine is an id within a cloud.
CREATE TEMP TABLE observed AS
    SELECT cloud, instance_id AS machine, hour_utc AS hour, device_uuid AS device, job_id AS job, attempt, rank, category,
           sum(ns)::BIGINT AS ns, min(instance_type) AS itype
    FROM device_in WHERE cloud IS NOT NULL AND instance_id IS NOT NULL
    GROUP BY ALL;

CREATE TEMP TABLE seen AS
    SELECT row_number() OVER () AS did, cloud, machine, hour, device, ns, itype
    FROM (SELECT cloud, machine, hour, device, sum(ns)::BIGINT AS ns, min(itype) AS itype FROM observed GROUP BY ALL);

-- Running time of a machine in an hour: the most that one of its devices was observed.
CREATE TEMP TABLE running AS
    SELECT cloud, machine, hour, max(ns) AS ns, count(*) AS devices, min(itype) AS itype FROM seen GROUP BY ALL;

-- === Rule 1: categories 1 to 6, the tie, categories 7 to 13 (section 3) =============================================

CREATE TEMP TABLE charge AS
    WITH today AS (
        -- HUGEINT from here on: // on a decimal is no integer division
        SELECT c.* REPLACE (x_DayBilledCost::HUGEINT AS x_DayBilledCost, x_DayEffectiveCost::HUGEINT AS x_DayEffectiveCost,
                            x_DayListCost::HUGEINT AS x_DayListCost, BilledCost::HUGEINT AS BilledCost,
                            EffectiveCost::HUGEINT AS EffectiveCost, ListCost::HUGEINT AS ListCost,
                            ConsumedQuantity::HUGEINT AS ConsumedQuantity, PricingQuantity::HUGEINT AS PricingQuantity),
            s.day_ns, s.day_ns + 86400000000000 AS next_ns,
            CASE WHEN ChargeCategory = 'Tax' THEN 'tax'
                 WHEN x_Class = 'rounding' THEN 'rounding'
                 WHEN ChargeCategory = 'Purchase'
                      AND (CommitmentDiscountId IS NOT NULL OR CapacityReservationId IS NOT NULL) THEN 'commitment_purchase'
                 WHEN CommitmentDiscountStatus = 'Unused' THEN 'commitment_unused'
                 WHEN CapacityReservationStatus = 'Unused' OR contains(x_UsageType, 'UnusedBox')
                      OR contains(x_UsageType, 'UnusedDed') THEN 'capacity_unused'
                 WHEN x_Class = 'support' THEN 'support' END AS early,
            coalesce(ChargeFrequency = 'Usage-Based', false) AS usage_based,
            ChargePeriodEnd - ChargePeriodStart AS length,
            greatest(ChargePeriodStart, s.day_ns) AS since,
            least(ChargePeriodEnd, s.day_ns + 86400000000000) AS until,
            ChargeCategory = 'Usage' AND ChargeClass IS NULL AND BilledCost >= 0 AND EffectiveCost >= 0 AS plain
        FROM charges_in c CROSS JOIN settings_in s WHERE c.x_UsageDate = s.day
    ), known AS (
        SELECT x_Cloud AS cloud, x_MachineId AS machine FROM today WHERE x_Class = 'machine' AND x_MachineId IS NOT NULL
        UNION SELECT cloud, machine FROM running
    ), hung AS (
        SELECT DISTINCT cloud, object_id FROM attach_in
    ), tied AS (
        SELECT t.*, early IS NULL AND k.machine IS NOT NULL AS on_machine,
               early IS NULL AND k.machine IS NULL AND h.object_id IS NOT NULL AS on_dependant
        FROM today t LEFT JOIN known k ON t.x_Cloud = k.cloud AND t.x_MachineId = k.machine
             LEFT JOIN hung h ON t.x_Cloud = h.cloud AND t.x_DependantId = h.object_id
    ), placed AS (
        -- Booked whole: what is not usage-based, and a long untied charge. A long charge that is tied to a machine
        -- follows its machine. A period without length, or outside its own day, cannot be spread.
        SELECT *, NOT usage_based OR length <= 0 OR until <= since
                  OR (length > 86400000000000 AND x_Class NOT IN ('machine', 'dependant') AND NOT on_machine) AS whole
        FROM tied
    )
    SELECT * REPLACE (coalesce(early, CASE
               WHEN on_machine OR on_dependant THEN NULL
               WHEN ChargeCategory = 'Credit' THEN 'credit'
               WHEN ChargeCategory = 'Adjustment' OR ChargeClass = 'Correction' THEN 'adjustment'
               WHEN BilledCost < 0 OR EffectiveCost < 0 THEN 'refund'
               WHEN x_Class IN ('storage', 'shared') THEN x_Class
               WHEN x_Class IN ('untied', 'dependant', 'machine') THEN 'untied'
               ELSE 'other_usage' END) AS early),
           row_number() OVER () AS id,
           -- first and last hour of the charge within the day
           CASE WHEN whole THEN least(greatest(ChargePeriodStart, day_ns), next_ns - 1) ELSE since END
               // 3600000000000 AS first_hour,
           CASE WHEN whole THEN least(greatest(ChargePeriodStart, day_ns), next_ns - 1) ELSE until - 1 END
               // 3600000000000 AS last_hour,
           -- quantity of time of the whole charge, in 1e-12 ns; null where the bill states none
           CASE WHEN ConsumedQuantity IS NOT NULL AND unit_ns(ConsumedUnit) IS NOT NULL
                     THEN ConsumedQuantity * unit_ns(ConsumedUnit)
                WHEN PricingQuantity IS NOT NULL AND unit_ns(PricingUnit) IS NOT NULL
                     THEN PricingQuantity * unit_ns(PricingUnit) END AS quantity
    FROM placed;

-- === Rule 2: hours of a charge (sections 4.3 to 4.5) ================================================================

CREATE TEMP TABLE touch AS
    SELECT id, n * 3600000000000 AS hour,
           greatest(0, least(until, (n + 1) * 3600000000000) - greatest(since, n * 3600000000000)) AS capacity
    FROM (SELECT id, since, until, unnest(range(first_hour, last_hour + 1)) AS n FROM charge);

-- Quantity of the day in ns. A charge within one hour keeps its exact quantity (rule 3); else the total is rounded
-- half-even to ns and telescoped like money. A negative quantity buys no time.
CREATE TEMP TABLE stretch AS
    WITH joined AS (
        SELECT c.id, t.hour, t.capacity, plain, coalesce(r.ns, 0) AS ran,
            CASE WHEN quantity IS NOT NULL
                 THEN telescoped(half_even(greatest(quantity, 0), 1000000000000), since - ChargePeriodStart,
                                 until - ChargePeriodStart, length) END AS stated
        FROM charge c JOIN touch t USING (id)
             LEFT JOIN running r ON r.cloud = c.x_Cloud AND r.machine = c.x_MachineId AND r.hour = t.hour
        WHERE on_machine AND NOT whole AND first_hour < last_hour
    )
    SELECT id, hour, capacity, plain, least(ran, capacity) AS ran,
           coalesce(stated, sum(capacity) OVER day) AS quantity,
           sum(least(ran, capacity)) OVER day AS all_ran,
           sum(capacity) OVER day AS all_capacity,
           sum(capacity - least(ran, capacity)) OVER day_so_far - (capacity - least(ran, capacity)) AS free_before,
           hour = max(hour) OVER day AS is_last
    FROM joined
    WINDOW day AS (PARTITION BY id), day_so_far AS (PARTITION BY id ORDER BY hour ROWS UNBOUNDED PRECEDING);

CREATE TEMP VIEW run_weights AS
    SELECT id AS grp, hour AS pos, quantity AS units, ran AS weight
    FROM stretch WHERE plain AND quantity <= all_ran AND all_ran > 0;

-- Time of a machine's row in each of several hours: by running time; what the bill counts beyond it goes to the
-- earliest free capacity, then to the last hour. Negative and non-usage rows have the capacity as weight.
CREATE TEMP TABLE hourly AS
    SELECT s.id, s.hour, CASE
        WHEN NOT plain THEN capacity
        WHEN quantity <= all_ran THEN coalesce(w.part, 0)
        ELSE ran + greatest(0, least(capacity - ran, quantity - all_ran - free_before))
             + CASE WHEN is_last THEN greatest(0, quantity - all_capacity) ELSE 0 END END AS ns
    FROM stretch s LEFT JOIN largest_remainder('run_weights') w ON w.grp = s.id AND w.pos = s.hour;

-- Money over those hours; all weights zero: the first hour.
CREATE TEMP VIEW hour_weights AS
    SELECT id * 3 + ledger AS grp, hour AS pos,
           CASE ledger WHEN 0 THEN x_DayBilledCost WHEN 1 THEN x_DayEffectiveCost ELSE x_DayListCost END AS units,
           CASE WHEN sum(ns) OVER (PARTITION BY id, ledger) > 0 THEN ns
                WHEN hour = first_hour * 3600000000000 THEN 1 ELSE 0 END AS weight
    FROM hourly JOIN charge USING (id) CROSS JOIN range(3) AS ledgers(ledger)
    WHERE ledger < 2 OR x_DayListCost IS NOT NULL;

CREATE TEMP TABLE part AS
    SELECT grp // 3 AS id, pos AS hour, sum(part) FILTER (grp % 3 = 0) AS billed,
           sum(part) FILTER (grp % 3 = 1) AS effective, sum(part) FILTER (grp % 3 = 2) AS list
    FROM largest_remainder('hour_weights') GROUP BY ALL
    UNION ALL
    SELECT id, first_hour * 3600000000000, x_DayBilledCost, x_DayEffectiveCost, x_DayListCost
    FROM charge WHERE whole OR (on_machine AND first_hour = last_hour)
    UNION ALL  -- untied and dependant rows: 4.4 on the charge, not on its day part
    SELECT id, hour, telescoped(BilledCost, a, b, length), telescoped(EffectiveCost, a, b, length),
           telescoped(ListCost, a, b, length)
    FROM (SELECT *, greatest(since, hour) - ChargePeriodStart AS a,
                 least(until, hour + 3600000000000) - ChargePeriodStart AS b
          FROM charge JOIN touch USING (id) WHERE NOT whole AND NOT on_machine);

-- === Rules 3, 4, 8: span, devices and estimates of a machine-hour (sections 4.6, 4.13) ==============================

-- Billed span: exact sum per meter, half-even to ns, the largest meter.
CREATE TEMP TABLE billed AS
    SELECT cloud, machine, hour, max(half_even(greatest(quantity, 0), 1000000000000))::BIGINT AS span
    FROM (SELECT x_Cloud AS cloud, x_MachineId AS machine, t.hour, coalesce(SkuMeter, '') AS meter,
                 sum(CASE WHEN h.id IS NOT NULL THEN h.ns * 1000000000000::HUGEINT
                          WHEN quantity IS NULL THEN capacity * 1000000000000::HUGEINT
                          WHEN whole OR (since = ChargePeriodStart AND until = ChargePeriodEnd) THEN quantity
                          ELSE telescoped(half_even(greatest(quantity, 0), 1000000000000), since - ChargePeriodStart,
                                          until - ChargePeriodStart, length) * 1000000000000 END) AS quantity
          FROM charge c JOIN touch t USING (id) LEFT JOIN hourly h ON h.id = c.id AND h.hour = t.hour
          WHERE on_machine AND x_Class = 'machine' AND plain
          GROUP BY ALL)
    GROUP BY ALL;

CREATE TEMP TABLE machine_hour AS
    WITH rows AS (
        SELECT * FROM charge WHERE x_Class = 'machine' AND x_MachineId IS NOT NULL
    ), touched AS (
        SELECT x_Cloud AS cloud, x_MachineId AS machine, hour, min(x_InstanceType) AS itype
        FROM rows JOIN touch USING (id) WHERE ChargeCategory = 'Usage' GROUP BY ALL
    ), per_day AS (
        SELECT x_Cloud AS cloud, x_MachineId AS machine, min(x_InstanceType) AS itype, min(RegionId) AS region,
               min((BillingAccountId, SubAccountId)) AS account, min(m.ns) AS mark
        FROM rows LEFT JOIN marks_in m ON m.cloud = x_Cloud AND m.account = BillingAccountId
                                      AND m.service = coalesce(ServiceName, '')
        GROUP BY ALL
    ), per_cloud AS (
        -- the services that machines of the cloud are billed under, else every service of the cloud
        SELECT m.cloud, coalesce(min(m.ns) FILTER (r.cloud IS NOT NULL), min(m.ns)) AS mark
        FROM marks_in m LEFT JOIN (SELECT DISTINCT x_Cloud AS cloud, coalesce(ServiceName, '') AS service FROM rows) r
             ON r.cloud = m.cloud AND r.service = m.service
        GROUP BY ALL
    ), keys AS (
        SELECT x_Cloud AS cloud, x_MachineId AS machine, hour FROM charge JOIN part USING (id) WHERE on_machine
        UNION SELECT cloud, machine, hour FROM running
    ), facts AS (
        SELECT k.*, coalesce(t.itype, r.itype, d.itype) AS itype, d.region, d.account, r.ns IS NOT NULL AS was_seen,
               b.span IS NOT NULL AS was_billed, coalesce(r.devices, 0) AS devices, b.span, r.ns AS ran,
               r.ns IS NOT NULL AND t.cloud IS NULL AND k.hour >= coalesce(d.mark, p.mark, k.hour) AS estimated
        FROM keys k LEFT JOIN running r USING (cloud, machine, hour) LEFT JOIN billed b USING (cloud, machine, hour)
             LEFT JOIN touched t USING (cloud, machine, hour) LEFT JOIN per_day d USING (cloud, machine)
             LEFT JOIN per_cloud p USING (cloud)
    )
    -- A machine-hour has one vector for all its rows (4.7): beyond the watermark its span is the observed running time.
    SELECT row_number() OVER () AS vid,
           f.* REPLACE (CASE WHEN was_billed THEN span WHEN estimated THEN ran ELSE 0 END AS span),
           greatest(coalesce(g.gpus, 0), devices, 1) AS gpus
    FROM facts f LEFT JOIN counts_in g USING (itype);

-- === Rule 4: the vector of a machine-hour (sections 4.6, 4.7; law 2) ================================================

CREATE TEMP TABLE fitted AS
    SELECT m.vid, m.span, s.did, s.ns AS device_ns, o.device, o.job, o.attempt, o.rank, o.category, o.ns,
           row_number() OVER (PARTITION BY s.did ORDER BY o.job, o.attempt, o.rank, o.category) AS pos
    FROM observed o JOIN seen s USING (cloud, machine, hour, device) JOIN machine_hour m USING (cloud, machine, hour);

-- Seen more than billed: scaled back to the span.
CREATE TEMP VIEW scale_weights AS
    SELECT did AS grp, pos, span::HUGEINT AS units, ns AS weight FROM fitted WHERE span > 0 AND device_ns > span;

CREATE TEMP TABLE slice AS
    SELECT vid, device, job, attempt, rank, category, coalesce(w.part, ns)::BIGINT AS ns
    FROM fitted f LEFT JOIN largest_remainder('scale_weights') w ON w.grp = f.did AND w.pos = f.pos
    UNION ALL  -- seen less than billed
    SELECT m.vid, device, NULL, NULL, NULL, 'unobserved', span - ns
    FROM seen s JOIN machine_hour m USING (cloud, machine, hour) WHERE span > s.ns
    UNION ALL  -- devices that no reading names
    SELECT vid, NULL, NULL, NULL, NULL, 'unobserved', (gpus - devices) * span
    FROM machine_hour WHERE gpus > devices AND span > 0
    UNION ALL  -- tied rows in an hour that is neither billed by time nor observed
    SELECT vid, NULL, NULL, NULL, NULL, 'unobserved', 0 FROM machine_hour WHERE NOT was_seen AND span = 0;

CREATE TEMP TABLE w_spans AS
    SELECT hour AS x_HourUtc, cloud AS x_Cloud, machine AS x_MachineId, device AS x_DeviceId, job AS x_JobId,
           attempt AS x_Attempt, rank AS x_Rank, category AS x_Category, sum(ns)::BIGINT AS x_Ns
    FROM slice JOIN machine_hour USING (vid) WHERE span > 0 GROUP BY ALL;

-- === Rule 6: dependants take the vector of the machines they hang on (section 4.8) ==================================

CREATE TEMP TABLE hanging AS
    SELECT p.id, p.hour, list(DISTINCT vid ORDER BY vid) AS vids
    FROM charge c JOIN part p USING (id)
         JOIN attach_in a ON a.cloud = x_Cloud AND a.object_id = x_DependantId AND a.hour_utc = p.hour
         JOIN machine_hour m ON m.cloud = a.cloud AND m.machine = a.instance_id AND m.hour = p.hour
    WHERE on_dependant AND (was_billed OR was_seen)
    GROUP BY ALL;

-- Several machines: one vector of both, under an id below zero.
CREATE TEMP TABLE joint AS
    SELECT vids, -row_number() OVER () AS vid FROM (SELECT DISTINCT vids FROM hanging WHERE len(vids) > 1);

-- Vectors in address order: code points of UTF-8, numbers as numbers, nulls last; two machines at one address stay two
-- rows, in the order of their ids. When all weights are zero, all money goes to the (first) unobserved row without a
-- device, which is added when absent.
CREATE TEMP TABLE vector AS
    WITH sources AS (
        SELECT vid, vid AS home FROM machine_hour UNION ALL SELECT vid, unnest(vids) FROM joint
    ), joined AS (
        SELECT o.vid, o.home, m.machine, s.* EXCLUDE (vid)
        FROM sources o JOIN slice s ON s.vid = o.home JOIN machine_hour m ON m.vid = o.home
    ), merged AS (
        SELECT vid, home, machine, device, job, attempt, rank, category, sum(ns)::BIGINT AS ns,
               device IS NULL AND job IS NULL AND attempt IS NULL AND rank IS NULL AND category = 'unobserved' AS is_rest
        FROM joined GROUP BY ALL
    ), completed AS (
        SELECT * FROM merged
        UNION ALL
        SELECT vid, arg_min(home, machine), min(machine), NULL, NULL, NULL, NULL, 'unobserved', 0, true
        FROM merged GROUP BY vid HAVING sum(ns) = 0 AND NOT bool_or(is_rest)
    )
    SELECT * EXCLUDE (is_rest),
           row_number() OVER (PARTITION BY vid ORDER BY device, job, attempt, rank, category, machine) AS pos,
           CASE WHEN sum(ns) OVER (PARTITION BY vid) > 0 THEN ns
                WHEN is_rest AND machine = min(machine) FILTER (is_rest) OVER (PARTITION BY vid) THEN 1
                ELSE 0 END AS weight
    FROM completed;

-- === What is to be addressed: hour parts of charges, and estimates (section 4.13) ===================================

-- List price of the day: the latest that is dated at or before it, else undated, else the earliest later one.
-- Without a price there is no estimate.
CREATE TEMP TABLE claim AS
    WITH priced AS (
        SELECT x_Cloud AS cloud, SkuId AS itype, RegionId AS region, ListUnitPrice::HUGEINT AS price, BillingCurrency AS currency,
               row_number() OVER (
                   PARTITION BY x_Cloud, SkuId, RegionId
                   ORDER BY CASE WHEN NOT regexp_matches(x_AsOf, '^[0-9]{4}') THEN 1
                                 WHEN x_AsOf <= day::VARCHAR THEN 0 ELSE 2 END,
                            CASE WHEN x_AsOf <= day::VARCHAR THEN x_AsOf END DESC, x_AsOf, BillingCurrency) AS place
        FROM prices_in CROSS JOIN settings_in
        WHERE PricingCategory = 'Standard' AND unit_ns(PricingUnit) = 3600000000000
    ), claims AS (
        SELECT x_ChargeKey AS charge, x_Occurrence AS occurrence, p.hour, c.x_Cloud AS cloud,
            coalesce(m.vid, j.vid, g.vids[1]) AS vid,
            CASE WHEN on_dependant AND g.id IS NULL THEN 'idle' ELSE early END AS category,
            billed, effective, list, NULL::HUGEINT AS estimate, x_InstanceType AS itype, PricingCategory AS pricing,
            BillingAccountId AS account, SubAccountId AS sub_account, BillingPeriodStart AS period, InvoiceId AS invoice,
            BillingCurrency AS currency, 'billed' AS state
        FROM part p JOIN charge c USING (id)
             LEFT JOIN machine_hour m ON on_machine AND m.cloud = x_Cloud AND m.machine = x_MachineId AND m.hour = p.hour
             LEFT JOIN hanging g ON g.id = p.id AND g.hour = p.hour LEFT JOIN joint j ON j.vids = g.vids
        UNION ALL
        SELECT 'estimate:' || m.cloud || '/' || machine, 0, hour, m.cloud, vid, NULL, NULL, NULL, NULL,
               half_even(price * span, 3600000000000 * coarse), m.itype, 'Standard', account[1], account[2], NULL, NULL,
               currency, 'provisional'
        FROM machine_hour m CROSS JOIN settings_in
             JOIN priced p ON p.place = 1 AND p.cloud = m.cloud AND p.itype = m.itype
                          AND p.region = coalesce(m.region, default_region)
        WHERE estimated
    )
    SELECT row_number() OVER () AS pid, *,
           coalesce(billed, 0) = 0 AND coalesce(effective, 0) = 0 AND coalesce(list, 0) = 0 AND coalesce(estimate, 0) = 0
               AS is_zero
    FROM claims;

-- === Rule 5: first rounding (section 4.10), each ledger on its own ==================================================

CREATE TEMP VIEW address_weights AS
    SELECT pid * 4 + ledger AS grp, pos, units, weight
    FROM (SELECT pid, vid, 0 AS ledger, billed AS units FROM claim UNION ALL SELECT pid, vid, 1, effective FROM claim
          UNION ALL SELECT pid, vid, 2, list FROM claim UNION ALL SELECT pid, vid, 3, estimate FROM claim)
         JOIN vector USING (vid)
    WHERE units <> 0 AND weight > 0;

-- The instance type of a work address is the charge's, else the machine's: a disk's work belongs to its machine's layers.
-- Where a ledger has no amount (null), its addresses have none.
CREATE TEMP TABLE w_addresses AS
    WITH shared AS (
        SELECT grp // 4 AS pid, pos, sum(part) FILTER (grp % 4 = 0) AS billed, sum(part) FILTER (grp % 4 = 1) AS effective,
               sum(part) FILTER (grp % 4 = 2) AS list, sum(part) FILTER (grp % 4 = 3) AS estimate
        FROM largest_remainder('address_weights') GROUP BY ALL
    ), spread AS (
        SELECT c.* REPLACE (coalesce(c.itype, m.itype) AS itype, v.category AS category,
                   CASE WHEN c.billed IS NOT NULL THEN coalesce(s.billed, 0) END AS billed,
                   CASE WHEN c.effective IS NOT NULL THEN coalesce(s.effective, 0) END AS effective,
                   CASE WHEN c.list IS NOT NULL THEN coalesce(s.list, 0) END AS list,
                   CASE WHEN c.estimate IS NOT NULL THEN coalesce(s.estimate, 0) END AS estimate),
               v.machine, device, job, attempt, rank
        FROM claim c JOIN vector v USING (vid) JOIN machine_hour m ON m.vid = v.home
             LEFT JOIN shared s ON s.pid = c.pid AND s.pos = v.pos
        -- no time and no money: no address; but a part that is zero keeps the addresses it has
        WHERE is_zero OR v.ns > 0 OR s.billed <> 0 OR s.effective <> 0 OR s.list <> 0 OR s.estimate <> 0
        UNION ALL
        SELECT *, NULL, NULL, NULL, NULL, NULL FROM claim WHERE vid IS NULL
    )
    SELECT charge AS x_ChargeKey, occurrence AS x_Occurrence, hour AS x_HourUtc, machine AS x_MachineId,
           device AS x_DeviceId, job AS x_JobId, attempt AS x_Attempt, rank AS x_Rank, category AS x_Category,
           billed AS BilledCost, effective AS EffectiveCost, list AS ListCost, estimate AS x_EstimatedCost,
           cloud, itype, pricing, account, sub_account, period, invoice, currency, state
    FROM spread;

-- === Rule 9: second rounding (section 4.11) =========================================================================

-- Layers of a job-hour on one instance type (of_type), and on all types together.
CREATE TEMP TABLE strand AS
    WITH work AS (SELECT * FROM layer_in WHERE category = 'work')
    SELECT *, row_number() OVER (PARTITION BY hour, job, attempt, of_type, itype
                                 ORDER BY layer, pass, op, phase, batch_size, dtype) AS pos,
           sum(ns) OVER (PARTITION BY hour, job, attempt, of_type, itype) AS total
    FROM (SELECT hour_utc AS hour, job_id AS job, attempt, true AS of_type, instance_type AS itype, layer, pass, op, phase,
                 batch_size, dtype, sum(ns)::BIGINT AS ns FROM work GROUP BY ALL
          UNION ALL
          SELECT hour_utc, job_id, attempt, false, NULL, layer, pass, op, phase, batch_size, dtype, sum(ns)::BIGINT
          FROM work GROUP BY ALL);

CREATE TEMP TABLE pool AS
    SELECT row_number() OVER () AS pid, p.*, t.job IS NOT NULL AS of_type,
           CASE WHEN t.job IS NOT NULL THEN p.itype END AS strands
    FROM (SELECT x_HourUtc AS hour, cloud, x_JobId AS job, x_Attempt AS attempt, itype, pricing, account, sub_account,
                 period, invoice, currency, state, sum(BilledCost) AS billed, sum(EffectiveCost) AS effective,
                 sum(x_EstimatedCost) AS estimate
          FROM w_addresses WHERE x_Category = 'work' AND x_JobId IS NOT NULL GROUP BY ALL) p
         LEFT JOIN (SELECT DISTINCT hour, job, attempt, itype FROM strand WHERE of_type) t
         ON t.hour = p.hour AND t.job = p.job AND t.attempt = p.attempt AND t.itype IS NOT DISTINCT FROM p.itype;

CREATE TEMP VIEW pool_strand AS
    SELECT p.*, s.pos, s.ns, layer, pass, op, phase, batch_size, dtype
    FROM pool p JOIN strand s ON s.hour = p.hour AND s.job = p.job AND s.attempt = p.attempt AND s.of_type = p.of_type
                             AND s.itype IS NOT DISTINCT FROM p.strands
    WHERE total > 0;  -- layers without any time cannot share out money

CREATE TEMP VIEW layer_weights AS
    SELECT pid * 3 + ledger AS grp, pos, units, ns AS weight
    FROM (SELECT pid, pos, ns, 0 AS ledger, billed AS units FROM pool_strand
          UNION ALL SELECT pid, pos, ns, 1, effective FROM pool_strand
          UNION ALL SELECT pid, pos, ns, 2, estimate FROM pool_strand)
    WHERE units IS NOT NULL;

CREATE TEMP TABLE w_layers AS
    WITH shared AS (
        SELECT grp // 3 AS pid, pos, sum(part) FILTER (grp % 3 = 0) AS billed, sum(part) FILTER (grp % 3 = 1) AS effective,
               sum(part) FILTER (grp % 3 = 2) AS estimate
        FROM largest_remainder('layer_weights') GROUP BY ALL
    )
    SELECT hour AS x_HourUtc, cloud AS x_Cloud, job AS x_JobId, attempt AS x_Attempt, itype AS x_InstanceType,
           pricing AS PricingCategory, account AS BillingAccountId, sub_account AS SubAccountId,
           period AS BillingPeriodStart, invoice AS InvoiceId, currency AS BillingCurrency, state AS x_State,
           layer AS x_Layer, pass AS x_Pass, op AS x_Op, phase AS x_Phase, batch_size AS x_BatchSize, dtype AS x_Dtype,
           s.billed AS BilledCost, s.effective AS EffectiveCost, s.estimate AS x_EstimatedCost
    FROM pool_strand p JOIN shared s USING (pid, pos);

-- === The comparison: one row on either side of each key, equal to the digit, or a difference ========================

CREATE TEMP TABLE d_addresses AS
    SELECT * EXCLUDE (side, b, e, l, x), count(*) FILTER (side) AS ours, count(*) FILTER (NOT side) AS theirs,
           sum(b) FILTER (side) AS BilledCost, sum(b) FILTER (NOT side) AS BilledCost_ledger,
           sum(e) FILTER (side) AS EffectiveCost, sum(e) FILTER (NOT side) AS EffectiveCost_ledger,
           sum(l) FILTER (side) AS ListCost, sum(l) FILTER (NOT side) AS ListCost_ledger,
           sum(x) FILTER (side) AS x_EstimatedCost, sum(x) FILTER (NOT side) AS x_EstimatedCost_ledger
    FROM (SELECT true AS side, x_ChargeKey, x_Occurrence, x_HourUtc, x_MachineId, x_DeviceId, x_JobId, x_Attempt, x_Rank,
                 x_Category, BilledCost AS b, EffectiveCost AS e, ListCost AS l, x_EstimatedCost AS x FROM w_addresses
          UNION ALL
          SELECT false, * REPLACE (BilledCost::HUGEINT AS BilledCost, EffectiveCost::HUGEINT AS EffectiveCost,
                                   ListCost::HUGEINT AS ListCost, x_EstimatedCost::HUGEINT AS x_EstimatedCost)
          FROM addresses_in)
    GROUP BY ALL
    HAVING count(*) FILTER (side) <> 1 OR count(*) FILTER (NOT side) <> 1
        OR sum(b) FILTER (side) IS DISTINCT FROM sum(b) FILTER (NOT side)
        OR sum(e) FILTER (side) IS DISTINCT FROM sum(e) FILTER (NOT side)
        OR sum(l) FILTER (side) IS DISTINCT FROM sum(l) FILTER (NOT side)
        OR sum(x) FILTER (side) IS DISTINCT FROM sum(x) FILTER (NOT side);

CREATE TEMP TABLE d_spans AS
    SELECT * EXCLUDE (side, n), count(*) FILTER (side) AS ours, count(*) FILTER (NOT side) AS theirs,
           sum(n) FILTER (side) AS x_Ns, sum(n) FILTER (NOT side) AS x_Ns_ledger
    FROM (SELECT true AS side, * RENAME (x_Ns AS n) FROM w_spans UNION ALL SELECT false, * FROM spans_in)
    GROUP BY ALL
    HAVING count(*) FILTER (side) <> 1 OR count(*) FILTER (NOT side) <> 1
        OR sum(n) FILTER (side) IS DISTINCT FROM sum(n) FILTER (NOT side);

CREATE TEMP TABLE d_layers AS
    SELECT * EXCLUDE (side, b, e, x), count(*) FILTER (side) AS ours, count(*) FILTER (NOT side) AS theirs,
           sum(b) FILTER (side) AS BilledCost, sum(b) FILTER (NOT side) AS BilledCost_ledger,
           sum(e) FILTER (side) AS EffectiveCost, sum(e) FILTER (NOT side) AS EffectiveCost_ledger,
           sum(x) FILTER (side) AS x_EstimatedCost, sum(x) FILTER (NOT side) AS x_EstimatedCost_ledger
    FROM (SELECT true AS side, * RENAME (BilledCost AS b, EffectiveCost AS e, x_EstimatedCost AS x) FROM w_layers
          UNION ALL
          SELECT false, * REPLACE (BilledCost::HUGEINT AS BilledCost, EffectiveCost::HUGEINT AS EffectiveCost,
                                   x_EstimatedCost::HUGEINT AS x_EstimatedCost)
          FROM layers_in)
    GROUP BY ALL
    HAVING count(*) FILTER (side) <> 1 OR count(*) FILTER (NOT side) <> 1
        OR sum(b) FILTER (side) IS DISTINCT FROM sum(b) FILTER (NOT side)
        OR sum(e) FILTER (side) IS DISTINCT FROM sum(e) FILTER (NOT side)
        OR sum(x) FILTER (side) IS DISTINCT FROM sum(x) FILTER (NOT side);

CREATE TEMP VIEW w_totals AS
    SELECT currency AS BillingCurrency, x_Category, sum(BilledCost) AS BilledCost, sum(EffectiveCost) AS EffectiveCost,
           sum(x_EstimatedCost) AS x_EstimatedCost
    FROM w_addresses GROUP BY ALL;
